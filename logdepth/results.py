"""Result files: what a run measured, one JSON file a run, and what models cost, one a device.

Every table and figure is made from them, so they hold all that may be asked later, and merge by being copied together.
All but `made` is the same whenever and however often interrupted a run is made on the same machine.
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
    """A split of the text."""

    tokens: int
    unknown: int
    words: int
    line_ends: int
    bytes: int
    documents: int
    sha256: str

    @classmethod
    def of(cls, info: StoreInfo) -> "SplitFacts":
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
    """The text that a run trained on and was measured on."""

    corpus: str
    store: str
    tokenizer_hash: str
    vocab_size: int
    separator: int | None
    splits: dict[str, SplitFacts]

    @classmethod
    def of(cls, prepared: Prepared) -> "DataFacts":
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
    """The test split at one context length."""

    context: int
    tokens: int
    nats: float
    loss: float
    token_perplexity: float
    word_perplexity: float
    bits_per_byte: float

    @classmethod
    def of(cls, evaluation: Evaluation) -> "Measured":
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
    """Text that is not the run's own, in its tokens."""

    name: str
    text: SplitFacts
    test: tuple[Measured, ...]
    """At some context lengths, ascending."""


@dataclass(frozen=True, kw_only=True)
class PositionLoss:
    """Nats a token at each position of windows of the test split; null where nothing was predicted."""

    context: int
    nats: tuple[float | None, ...]
    tokens: tuple[int, ...]

    @classmethod
    def of(cls, evaluation: Evaluation) -> "PositionLoss":
        nats = tuple(round(nats, 6) if math.isfinite(nats) else None for nats in evaluation.position_loss.tolist())
        return cls(context=evaluation.context, nats=nats, tokens=tuple(evaluation.position_tokens.tolist()))


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """Training loss since the point before, or validation loss, at a step."""

    step: int
    loss: float


@dataclass(frozen=True, kw_only=True)
class Sample:
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Made:
    """How this file came to be: what another making of the same run would not repeat."""

    command: str
    at: str
    training_seconds: float
    tokens_per_second: float | None
    """In training, the median over its lines of metrics."""


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run: a model, trained on a corpus from a seed, and measured."""

    recipe: str
    row: str
    """The model's name in tables: the recipe's without the corpus."""
    config: RunConfig
    parameters: int
    data: DataFacts
    environment: dict[str, Any]
    steps: int
    best_step: int
    finished: str
    """Why training ended."""
    valid_loss: float
    """The best, whose weights were measured."""
    test: tuple[Measured, ...]
    """At each context length, ascending."""
    positions: PositionLoss
    train_curve: tuple[CurvePoint, ...]
    valid_curve: tuple[CurvePoint, ...]
    samples: tuple[Sample, ...]
    made: Made
    others: tuple[OtherText, ...] = ()

    def __post_init__(self) -> None:
        if not self.test:
            raise ValueError("test must hold a measurement")
        if missing := {"train", "valid", "test"} - self.data.splits.keys():
            raise ValueError(f"data.splits has no {min(missing)}")
        if "device" not in self.environment:
            raise ValueError("environment has no device")

    def at(self, context: int) -> Measured | None:
        """What was measured at a context length."""
        return next((one for one in self.test if one.context == context), None)

    @property
    def main(self) -> Measured:
        """At the length that the model was trained at, or the nearest there is."""
        return min(self.test, key=lambda one: abs(one.context - self.config.train.context))


@dataclass(frozen=True, kw_only=True)
class ModelTimings:
    recipe: str
    row: str
    parameters: int
    timings: tuple[Timing, ...]


@dataclass(frozen=True, kw_only=True)
class TimingResult:
    """All models of a study timed in one sitting on one device: their ratios mean something."""

    corpus: str
    what: What
    precision: str
    environment: dict[str, Any]
    models: tuple[ModelTimings, ...]
    accelerated: bool = False
    """Whether CUDA graphs were on, and fused kernels for models that have them."""
    compiled: bool = False
    """Whether torch.compile was on, for models without fused kernels."""
    made: str
    """The command."""

    def __post_init__(self) -> None:
        contexts = {tuple(one.context for one in model.timings) for model in self.models}
        if len(contexts) != 1 or contexts == {()}:
            raise ValueError("models must hold timings of each model at the same lengths")
        if "device" not in self.environment:
            raise ValueError("environment has no device")


class Results(NamedTuple):
    """All that a folder of result files holds."""

    runs: list[RunResult]
    timings: list[TimingResult]


SCHEMAS: dict[str, type[RunResult | TimingResult]] = {"logdepth.run": RunResult, "logdepth.timing": TimingResult}


def write_result(path: Path, result: RunResult | TimingResult) -> None:
    """A line for each field: half the size of JSON with a line for each number, and a diff still says what changed."""
    schema = next(name for name, kind in SCHEMAS.items() if isinstance(result, kind))
    fields = {"schema": schema, "version": VERSION} | to_dict(result)
    lines = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def read_result(path: Path) -> RunResult | TimingResult:
    """A result file, strictly: whatever is not as it should be is an error that names the file."""
    try:
        saved = read_json(path)
    except UserError as error:
        raise UserError(f"{error}; remove it: the `logdepth reproduce` that made it makes it again") from None
    schema = saved.get("schema") if isinstance(saved, dict) else None
    if schema not in SCHEMAS:
        raise UserError(f"{path} is not a result file of logdepth: its schema is {schema!r}; move it away")
    if saved.get("version") != VERSION:
        raise UserError(
            f"{path} has version {saved.get('version')} of '{schema}'; this logdepth reads version {VERSION}: "
            "make it again, or use the logdepth that wrote it"
        )
    fields = {name: value for name, value in saved.items() if name not in ("schema", "version")}
    try:
        return from_dict(SCHEMAS[schema], fields, str(path))
    except UserError as error:
        raise UserError(f"{error}; the file is damaged or was changed: remove it and make it again") from None


def read_results(folder: Path) -> Results:
    """Every result file of a folder, by name; an error where they do not belong together."""
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
                f"{path} is of the corpus '{timing.corpus}', not '{min(corpora)}'; keep it in another folder"
            )
    return Results(list(runs.values()), list(timings.values()))


def refuse_other_text(texts: Mapping[str, DataFacts], folder: Path) -> None:
    """Numbers from different texts or tokens must not stand in one table. `texts`: whose they are → what they are."""
    for (first_name, first), (name, data) in itertools.product(list(texts.items())[:1], texts.items()):
        for what, mine, firsts in (
            ("test text", data.splits["test"].sha256, first.splits["test"].sha256),
            ("training text", data.splits["train"].sha256, first.splits["train"].sha256),
            ("tokenizer", data.tokenizer_hash, first.tokenizer_hash),
        ):
            if mine != firsts:
                raise UserError(
                    f"{folder}: {name} has another {what} than {first_name}; their numbers cannot stand in one table: "
                    "keep them in two folders"
                )


def _refuse_other_configs(runs: Mapping[Path, RunResult]) -> None:
    """The seeds of a row are of one config, each there once: else their mean would mean nothing."""
    firsts: dict[str, tuple[Path, RunResult]] = {}
    seeds: dict[tuple[str, int], Path] = {}
    for path, run in runs.items():
        seed = run.config.seed
        if (run.row, seed) in seeds:
            raise UserError(f"{path} is of the same model and seed as {seeds[run.row, seed].name}; keep one of them")
        seeds[run.row, seed] = path
        first_path, first = firsts.setdefault(run.row, (path, run))
        mine, theirs = decisive(run.config), decisive(first.config)
        for name in sorted(mine.keys() | theirs.keys()):
            if name != "seed" and mine.get(name) != theirs.get(name):
                raise UserError(
                    f"{path} was made with {name} {mine.get(name)!r}, {first_path.name} with {theirs.get(name)!r}; "
                    "they are not seeds of one model: keep them in two folders"
                )


def _refuse_one_name_for_two_texts(runs: Mapping[Path, RunResult]) -> None:
    firsts: dict[str, tuple[Path, str]] = {}
    for path, other in ((path, other) for path, run in runs.items() for other in run.others):
        first_path, sha256 = firsts.setdefault(other.name, (path, other.text.sha256))
        if other.text.sha256 != sha256:
            raise UserError(f"{path} has another text named '{other.name}' than {first_path.name}; measure one again")


def slug(text: str) -> str:
    """A text as part of a file's name."""
    return "-".join("".join(sign if sign.isalnum() else " " for sign in text.lower()).split())
