"""Result files: one JSON file per run with its measurements, and one per device with the times of all models.

All tables and figures are made from these files. Studies are merged by copying their files into one folder. On the
same machine a run always produces the same file except `made`, even if it is interrupted and resumed.
"""

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from logdepth.atomic import read_json, write_text
from logdepth.config import from_dict, to_dict
from logdepth.data import Prepared, StoreInfo
from logdepth.errors import UserError
from logdepth.evaluate import Evaluation
from logdepth.runs import RunConfig, decisive
from logdepth.timing import Timing, What

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class SplitFacts:
    """Counts and checksum of one split."""

    tokens: int
    unknown: int
    words: int
    line_ends: int
    bytes: int
    documents: int
    sha256: str

    @classmethod
    def of(cls, info: StoreInfo) -> "SplitFacts":
        """Create the facts of a token store."""
        return cls(
            tokens=info.tokens,
            unknown=info.unknown,
            words=info.words,
            line_ends=info.line_ends,
            bytes=info.bytes,
            documents=info.documents,
            sha256=info.text_sha256,
        )


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """The text on which a run was trained and evaluated."""

    corpus: str
    store: str
    tokenizer_hash: str
    vocab_size: int
    separator: int | None
    splits: dict[str, SplitFacts]

    @classmethod
    def of(cls, prepared: Prepared) -> "DataFacts":
        """Create the facts of a prepared corpus."""
        infos = {split: store.info for split, store in prepared.stores.items()}
        return cls(
            corpus=infos["test"].corpus,
            store=prepared.key,
            tokenizer_hash=infos["test"].tokenizer_hash,
            vocab_size=prepared.tokenizer.vocab_size,
            separator=infos["test"].separator,
            splits={split: SplitFacts.of(info) for split, info in infos.items()},
        )


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The evaluation of a test split at one context length."""

    context: int
    tokens: int
    nats: float
    loss: float
    token_perplexity: float
    word_perplexity: float
    bits_per_byte: float

    @classmethod
    def of(cls, evaluation: Evaluation) -> "Measured":
        """Create the record of an evaluation."""
        return cls(
            context=evaluation.context,
            tokens=evaluation.tokens,
            nats=evaluation.nats,
            loss=evaluation.loss,
            token_perplexity=evaluation.token_perplexity,
            word_perplexity=evaluation.word_perplexity,
            bits_per_byte=evaluation.bits_per_byte,
        )


@dataclass(frozen=True, kw_only=True)
class OtherText:
    """The evaluation of a run on text other than its own corpus, with the run's tokenizer."""

    name: str
    text: SplitFacts
    test: tuple[Measured, ...]
    """Evaluations by ascending context length."""


@dataclass(frozen=True, kw_only=True)
class PositionLoss:
    """Loss in nats per token at each position of a window, over the test split; None if nothing was predicted there."""

    context: int
    nats: tuple[float | None, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, evaluation: Evaluation) -> "PositionLoss":
        """Create the record of an evaluation's loss by position."""
        nats = tuple(round(nats, 6) if math.isfinite(nats) else None for nats in evaluation.position_loss.tolist())
        return cls(context=evaluation.context, nats=nats, tokens=tuple(evaluation.position_tokens.tolist()))


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """A point of a loss curve: the validation loss at a step, or the training loss since the previous point."""

    step: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A generated text and its prompt."""

    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Made:
    """How the file was made: the facts that differ if the same run is made again."""

    command: str
    at: str
    training_seconds: float
    tokens_per_second: float | None
    """Median training speed over the run's metrics."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of one run: a model trained on a corpus from a seed and evaluated."""

    recipe: str
    row: str
    """The model's name in tables: the recipe's name without the corpus."""
    config: RunConfig
    parameters: int
    data: DataFacts
    environment: dict[str, Any]
    steps: int
    best_step: int
    finished: str
    """Why training ended."""
    valid_loss: float
    """The lowest validation loss. The weights with this loss were evaluated."""
    test: tuple[Measured, ...]
    """Evaluations of the test split by ascending context length."""
    positions: PositionLoss
    train_curve: tuple[CurvePoint, ...]
    valid_curve: tuple[CurvePoint, ...]
    samples: tuple[Sample, ...]
    made: Made
    others: tuple[OtherText, ...] = ()

    def __post_init__(self) -> None:
        if not self.test:
            raise ValueError("test must contain at least one evaluation")
        if missing := {"train", "valid", "test"} - self.data.splits.keys():
            raise ValueError(f"data.splits has no {min(missing)}")
        if "device" not in self.environment:
            raise ValueError("environment has no device")

    def at(self, context: int) -> Measured | None:
        """Return the evaluation at a context length; None if there is none."""
        return next((one for one in self.test if one.context == context), None)

    @property
    def main(self) -> Measured:
        """The evaluation at the training length, or at the nearest length."""
        return min(self.test, key=lambda one: abs(one.context - self.config.train.context))


@dataclass(frozen=True, kw_only=True)
class ModelTimings:
    """The times of one model."""

    recipe: str
    row: str
    parameters: int
    timings: tuple[Timing, ...]


@dataclass(frozen=True, kw_only=True)
class TimingResult:
    """The times of all models of a study, measured together on one device, so that their ratios are meaningful."""

    corpus: str
    what: What
    precision: str
    environment: dict[str, Any]
    models: tuple[ModelTimings, ...]
    accelerated: bool = False
    """Whether CUDA graphs were used, and fused kernels for models that have them."""
    compiled: bool = False
    """Whether torch.compile was used for models without fused kernels."""
    made: str
    """The command that made the file."""

    def __post_init__(self) -> None:
        contexts = {tuple(one.context for one in model.timings) for model in self.models}
        if len(contexts) != 1 or contexts == {()}:
            raise ValueError("models must contain timings of each model at the same lengths")
        if "device" not in self.environment:
            raise ValueError("environment has no device")


class Results(NamedTuple):
    """All results in a folder."""

    runs: list[RunResult]
    timings: list[TimingResult]


SCHEMAS: dict[str, type[RunResult | TimingResult]] = {"logdepth.run": RunResult, "logdepth.timing": TimingResult}


def write_result(path: Path, result: RunResult | TimingResult) -> None:
    """Write a result file with one line per field, which is compact and still gives readable diffs."""
    schema = next(name for name, kind in SCHEMAS.items() if isinstance(result, kind))
    fields = {"schema": schema, "version": VERSION} | to_dict(result)
    lines = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def read_result(path: Path) -> RunResult | TimingResult:
    """Read a result file strictly. Any deviation from the schema is a UserError that names the file."""
    try:
        saved = read_json(path)
    except UserError as error:
        raise UserError(f"{error}; remove it and run the `logdepth reproduce` command that made it again") from None
    schema = saved.get("schema") if isinstance(saved, dict) else None
    if schema not in SCHEMAS:
        raise UserError(f"{path} is not a result file of logdepth: its schema is {schema!r}; move it to another folder")
    if saved.get("version") != VERSION:
        raise UserError(
            f"{path} has version {saved.get('version')} of '{schema}'; this logdepth reads version {VERSION}: "
            "make it again, or use the version of logdepth that wrote it"
        )
    fields = {name: value for name, value in saved.items() if name not in ("schema", "version")}
    try:
        return from_dict(SCHEMAS[schema], fields, str(path))
    except UserError as error:
        raise UserError(f"{error}; the file is damaged or was edited: remove it and make it again") from None


def read_results(folder: Path) -> Results:
    """Read all result files of a folder in order of their names. Raise a UserError if they are incompatible."""
    files = {path: read_result(path) for path in sorted(folder.glob("*.json"))}
    runs = {path: result for path, result in files.items() if isinstance(result, RunResult)}
    timings = {path: result for path, result in files.items() if isinstance(result, TimingResult)}
    refuse_other_text({path.name: run.data for path, run in runs.items()}, folder)
    _refuse_other_configs(runs)
    _refuse_one_name_for_two_texts(runs)
    corpora = {run.data.corpus for run in runs.values()} or {timing.corpus for timing in timings.values()}
    for path, timing in timings.items():
        if {timing.corpus} != corpora:
            raise UserError(
                f"{path} belongs to the corpus '{timing.corpus}', not '{min(corpora)}'; move it to another folder"
            )
    return Results(list(runs.values()), list(timings.values()))


def refuse_other_text(texts: Mapping[str, DataFacts], folder: Path) -> None:
    """Raise a UserError if results are from different texts or tokenizers and so must not share a table.

    `texts` maps the name of each result to its text.
    """
    for (first_name, first), (name, data) in itertools.product(list(texts.items())[:1], texts.items()):
        for what, mine, firsts in (
            ("test text", data.splits["test"].sha256, first.splits["test"].sha256),
            ("training text", data.splits["train"].sha256, first.splits["train"].sha256),
            ("tokenizer", data.tokenizer_hash, first.tokenizer_hash),
        ):
            if mine != firsts:
                raise UserError(
                    f"{folder}: {name} has another {what} than {first_name}, so they cannot share a table; "
                    "move one of them to another folder"
                )


def _refuse_other_configs(runs: Mapping[Path, RunResult]) -> None:
    """Raise a UserError if runs of a row have different configs or the same seed, so that no mean is possible."""
    firsts: dict[str, tuple[Path, RunResult]] = {}
    seeds: dict[tuple[str, int], Path] = {}
    for path, run in runs.items():
        seed = run.config.seed
        if (run.row, seed) in seeds:
            raise UserError(f"{path} has the same model and seed as {seeds[run.row, seed].name}; remove one of them")
        seeds[run.row, seed] = path
        first_path, first = firsts.setdefault(run.row, (path, run))
        mine, theirs = decisive(run.config), decisive(first.config)
        for name in sorted(mine.keys() | theirs.keys()):
            if name != "seed" and mine.get(name) != theirs.get(name):
                raise UserError(
                    f"{path} was made with {name} {mine.get(name)!r}, {first_path.name} with {theirs.get(name)!r}; "
                    "they are not seeds of the same model: move one of them to another folder"
                )


def _refuse_one_name_for_two_texts(runs: Mapping[Path, RunResult]) -> None:
    firsts: dict[str, tuple[Path, str]] = {}
    for path, other in ((path, other) for path, run in runs.items() for other in run.others):
        first_path, sha256 = firsts.setdefault(other.name, (path, other.text.sha256))
        if other.text.sha256 != sha256:
            raise UserError(
                f"{path} has another text named '{other.name}' than {first_path.name}; make one of them again"
            )


def slug(text: str) -> str:
    """Convert a text to a part of a file name: lower case, with hyphens between words."""
    return "-".join("".join(sign if sign.isalnum() else " " for sign in text.lower()).split())
