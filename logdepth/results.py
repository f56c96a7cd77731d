"""Result files: one JSON file per run with its measurements, and one per device with the times of all models.

All tables and figures are made from these files. Studies are merged by copying their files into one folder. On the
same machine a run always produces the same file except `made` and the checksum, even if it is interrupted and resumed.

A file has a checksum. Numbers that follow from others, such as a perplexity from a loss, are verified as well, so that
a wrong one is found also in files of older versions, which have no checksum.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from logdepth.atomic import read_json, write_text
from logdepth.checksums import CHECKSUM, seal, unseal
from logdepth.config import flattened, from_dict, to_dict
from logdepth.data import Prepared, StoreInfo
from logdepth.errors import UserError
from logdepth.evaluate import Evaluation, perplexity
from logdepth.models import num_parameters, unallocated
from logdepth.runs import RunConfig, decisive
from logdepth.timing import Timing, What

VERSION = 1
REMEDY = "remove it and run the `logdepth reproduce` command that made it again"
TOLERANCE = 1e-9
"""Largest relative error of a derived number: functions such as exp differ in their last bits between machines."""
ROUNDING = 0.5e-6
"""Largest error of the losses in curves and by position, which are rounded to six digits."""
EACH_POSITION = 4_096
"""Length of a window up to which the loss is kept for each position. Longer lists would be most of a result file."""
BINS_PER_OCTAVE = 8
NEWER_FIELDS = {
    *(f"train.{name}" for name in ("optimizer", "muon_learning_rate", "muon_momentum", "schedule", "decay_fraction")),
    "train.shift_windows",
}
"""Fields of a config that files without checksums may lack, because they are older than these fields."""


def verify(name: str, found: float, expected: float, tolerance: float = TOLERANCE) -> None:
    """Raise a ValueError unless a number is what the numbers that it follows from give."""
    if found != expected and not math.isclose(found, expected, rel_tol=tolerance):
        raise ValueError(f"{name} is {found}, but the other numbers give {expected}")


def _require_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number; got {value}")


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

    def __post_init__(self) -> None:
        for name in ("tokens", "unknown", "words", "line_ends", "bytes", "documents"):
            if not 0 <= getattr(self, name) < 2**63:
                raise ValueError(f"{name} must be from 0 to below 2^63; got {getattr(self, name)}")

    def verify(self, test: "Sequence[Measured]") -> None:
        """Raise a ValueError if evaluations do not fit the counts of this split, which they measured."""
        for number, one in enumerate(test):
            where = f"test[{number}]"
            verify(f"{where}.tokens", one.tokens, self.tokens - 1)  # every token but the first is predicted
            if self.bytes < 1 or self.words + self.line_ends < 1:
                raise ValueError("the evaluated split has no words or no bytes")
            words = perplexity(one.nats / (self.words + self.line_ends))
            verify(f"{where}.word_perplexity", one.word_perplexity, words)
            verify(f"{where}.bits_per_byte", one.bits_per_byte, one.nats / math.log(2) / self.bytes)
        if [one.context for one in test] != sorted({one.context for one in test}):
            raise ValueError("the contexts in test must be ascending")

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

    def __post_init__(self) -> None:
        if not (1 <= self.context < 2**63 and 1 <= self.tokens < 2**63 and 0 <= self.nats < math.inf):
            raise ValueError(
                "context and tokens must be at least 1, and nats a finite number from 0; got "
                f"{self.context}, {self.tokens} and {self.nats}"
            )
        verify("loss", self.loss, self.nats / self.tokens)
        verify("token_perplexity", self.token_perplexity, perplexity(self.loss))

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
    positions: "PositionLoss | None" = None
    """Loss by position at the longest context length; None in files of older versions."""

    def __post_init__(self) -> None:
        self.text.verify(self.test)
        if self.positions is not None:
            if not self.test or self.positions.context != self.test[-1].context:
                raise ValueError("positions must be of the longest context length in test")
            self.positions.verify(self.test[-1])


@dataclass(frozen=True, kw_only=True)
class PositionLoss:
    """Loss in nats per token by position in a window, over the evaluated text; None if nothing was predicted there.

    Positions of windows longer than `EACH_POSITION` tokens are counted together in bins, eight per octave.
    """

    context: int
    nats: tuple[float | None, ...]
    tokens: tuple[int, ...]
    ends: tuple[int, ...] | None = None
    """The position at which each bin ends, exclusive. None: every position is a bin of its own."""

    def __post_init__(self) -> None:
        if [one is not None for one in self.nats] != [count > 0 for count in self.tokens]:
            raise ValueError("nats must have a number for each position at which tokens were predicted, else null")
        if self.ends is not None and (
            len(self.ends) != len(self.tokens) or list(self.ends) != sorted({0, *self.ends})[1:]
        ):
            raise ValueError("ends must be ascending numbers above 0, one for each number in tokens")

    def verify(self, whole: Measured) -> None:
        """Raise a ValueError if the positions do not add up to the evaluation at this context length."""
        verify("the number of positions", max(self.bin_ends, default=0), min(self.context, whole.tokens))
        verify("the sum of positions.tokens", sum(self.tokens), whole.tokens)
        nats = math.fsum(loss * count for loss, count in zip(self.nats, self.tokens, strict=True) if loss is not None)
        if not abs(nats - whole.nats) <= (ROUNDING + TOLERANCE * whole.loss) * whole.tokens:
            raise ValueError(f"positions.nats add up to {nats}, but the evaluation at this length has {whole.nats}")

    @property
    def bin_ends(self) -> Sequence[int]:
        """The position at which each bin ends, exclusive."""
        return range(1, len(self.tokens) + 1) if self.ends is None else self.ends

    @classmethod
    def of(cls, evaluation: Evaluation) -> "PositionLoss":
        """Create the record of an evaluation's loss by position."""
        losses, counts = evaluation.position_nats, evaluation.position_tokens
        ends = _bin_ends(len(counts)) if len(counts) > EACH_POSITION else None
        if ends is not None:
            starts = [0, *ends[:-1]]
            losses, counts = np.add.reduceat(losses, starts), np.add.reduceat(counts, starts)
        pairs = zip(losses.tolist(), counts.tolist(), strict=True)
        nats = tuple(round(loss / count, 6) if count else None for loss, count in pairs)
        return cls(context=evaluation.context, nats=nats, tokens=tuple(counts.tolist()), ends=ends)


def _bin_ends(length: int) -> tuple[int, ...]:
    """Return where bins end: after every position at first, and then at eight places per octave."""
    octaves = math.ceil(math.log2(length))
    places = {min(round(2 ** (number / BINS_PER_OCTAVE)), length) for number in range(octaves * BINS_PER_OCTAVE + 1)}
    return tuple(sorted(places | {length}))


@dataclass(frozen=True, kw_only=True)
class CurvePoint:
    """A point of a loss curve: the validation loss at a step, or the training loss since the previous point."""

    step: int
    loss: float

    def __post_init__(self) -> None:
        _require_finite("loss", self.loss)


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

    def __post_init__(self) -> None:
        _require_finite("training_seconds", self.training_seconds)
        _require_finite("tokens_per_second", self.tokens_per_second or 0.0)


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
        _verify_names(self.recipe, self.row, self.config.data.corpus)
        if self.data.corpus != self.config.data.corpus:
            raise ValueError(f"data.corpus is '{self.data.corpus}', but config has '{self.config.data.corpus}'")
        self.data.splits["test"].verify(self.test)
        whole = self.at(self.positions.context)
        if whole is None:
            raise ValueError(f"positions.context is {self.positions.context}, at which test has no evaluation")
        self.positions.verify(whole)
        self._verify_curves()

    def _verify_curves(self) -> None:
        losses = {point.step: point.loss for point in self.valid_curve}
        for name, curve in (("train_curve", self.train_curve), ("valid_curve", self.valid_curve)):
            if [point.step for point in curve] != sorted({point.step for point in curve}):
                raise ValueError(f"the steps of {name} must be ascending")
        if self.best_step not in losses:
            raise ValueError(f"best_step is {self.best_step}, which is no step of valid_curve")
        verify("steps", self.steps, max(losses))
        lowest = min(losses.values())
        verify("the loss of valid_curve at best_step", losses[self.best_step], lowest)
        if not abs(self.valid_loss - lowest) <= ROUNDING + TOLERANCE:
            raise ValueError(f"valid_loss is {self.valid_loss}, but the lowest loss of valid_curve is {lowest}")

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

    def __post_init__(self) -> None:
        for number, one in enumerate(self.timings):
            where = f"timings[{number}]"
            if not 0 < one.fastest <= one.lower_quartile <= one.milliseconds <= one.upper_quartile < math.inf:
                raise ValueError(
                    f"the times of {where} must be above 0 and in the order fastest, lower_quartile, milliseconds "
                    f"(the median), upper_quartile; got {one.fastest}, {one.lower_quartile}, {one.milliseconds}, "
                    f"{one.upper_quartile}"
                )
            speed = one.batch_size * one.context / (one.milliseconds / 1e3)
            verify(f"{where}.tokens_per_second", one.tokens_per_second, speed)


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
        for model in self.models:
            _verify_names(model.recipe, model.row, self.corpus)


def _verify_names(recipe: str, row: str, corpus: str) -> None:
    if recipe != f"{corpus}-{row}":
        raise ValueError(f"row is '{row}' and the corpus '{corpus}', but recipe is '{recipe}'")


class Results(NamedTuple):
    """All results in a folder."""

    runs: list[RunResult]
    timings: list[TimingResult]


SCHEMAS: dict[str, type[RunResult | TimingResult]] = {"logdepth.run": RunResult, "logdepth.timing": TimingResult}


def write_result(path: Path, result: RunResult | TimingResult) -> None:
    """Write a result file with one line per field, which is compact and still gives readable diffs."""
    schema = next(name for name, kind in SCHEMAS.items() if isinstance(result, kind))
    fields = seal({"schema": schema, "version": VERSION} | to_dict(result))
    lines = [f"{json.dumps(name)}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items()]
    write_text(path, "{\n" + ",\n".join(lines) + "\n}\n")


def read_result(path: Path) -> RunResult | TimingResult:
    """Read a result file strictly. Damage and any deviation from the schema are UserErrors that name the file."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file; move it to another folder")
    try:
        saved = read_json(path)
    except UserError as error:
        raise UserError(f"{error}; {REMEDY}") from None
    try:
        return _decoded(saved, path)
    except RecursionError:
        raise UserError(f"{path} is damaged (its brackets are nested too deeply); {REMEDY}") from None


def _decoded(saved: Any, path: Path) -> RunResult | TimingResult:
    is_sealed = isinstance(saved, dict) and CHECKSUM in saved
    if is_sealed:
        saved = unseal(saved, path, REMEDY)
    schema = saved.get("schema") if isinstance(saved, dict) else None
    if not isinstance(schema, str) or schema not in SCHEMAS:
        raise UserError(f"{path} is not a result file of logdepth: its schema is {schema!r}; move it to another folder")
    if saved.get("version") != VERSION:
        raise UserError(
            f"{path} has version {saved.get('version')} of '{schema}'; this logdepth reads version {VERSION}: "
            "make it again, or use the version of logdepth that wrote it"
        )
    fields = {name: value for name, value in saved.items() if name not in ("schema", "version")}
    try:
        result = from_dict(SCHEMAS[schema], fields, str(path))
        if not is_sealed:
            unseal(saved, path, REMEDY)  # says that there is no checksum
            _verify_unsealed(result, fields, str(path))
    except UserError as error:
        raise UserError(f"{error}; the file is damaged or was edited: {REMEDY}") from None
    return result


def _verify_unsealed(result: RunResult | TimingResult, saved: dict[str, Any], where: str) -> None:
    """Raise a UserError if a file without a checksum lacks fields of its config, or has a config of another size.

    Missing fields would get today's defaults without a word.
    """
    if isinstance(result, RunResult):
        absent = flattened(to_dict(result.config)).keys() - flattened(saved["config"]).keys() - NEWER_FIELDS
        if absent:
            raise UserError(f"{where}.config: the field '{min(absent)}' is missing")
        try:
            with unallocated():
                parameters = num_parameters(result.config.model.build(result.data.vocab_size))
        except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
            raise UserError(f"{where}.config.model cannot be built ({str(error).splitlines()[0]})") from None
        if result.parameters != parameters:
            raise UserError(f"{where}: parameters is {result.parameters}, but config gives {parameters}")


def read_results(folder: Path) -> Results:
    """Read all result files of a folder. Raise a UserError if they are incompatible.

    Runs are in order of recipe and seed, and timings in order of device, so that names of files do not matter.
    """
    files = {path: read_result(path) for path in sorted(folder.glob("*.json"))}
    runs = {path: result for path, result in files.items() if isinstance(result, RunResult)}
    runs = dict(sorted(runs.items(), key=lambda one: (one[1].recipe, one[1].config.seed)))
    timings = {path: result for path, result in files.items() if isinstance(result, TimingResult)}
    timings = dict(sorted(timings.items(), key=lambda one: _order_of(one[1])))
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


def _order_of(timing: TimingResult) -> tuple[str, bool, bool]:
    return str(timing.environment["device"]), timing.accelerated, timing.compiled


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
