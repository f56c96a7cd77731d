"""Evaluate a finished run for its result file, and time all models of a study together.

Each evaluation is kept in the run's folder as soon as it is made, so that an interrupted study does not repeat it.
"""

import datetime
import math
import shlex
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from logdepth.acceleration import compile_model
from logdepth.atomic import read_json, write_json
from logdepth.checksums import seal, unseal
from logdepth.config import from_dict, to_dict
from logdepth.data import CORPORA, Prepared, TokenStore
from logdepth.data.cache import cache_key
from logdepth.errors import UserError
from logdepth.evaluate import Evaluation, evaluate
from logdepth.generate import SamplingConfig, generate
from logdepth.models import num_parameters
from logdepth.reproduce.study import Study
from logdepth.results import (
    CurvePoint,
    DataFacts,
    Made,
    Measured,
    ModelTimings,
    OtherText,
    PositionLoss,
    RunResult,
    Sample,
    SplitFacts,
    TimingResult,
    slug,
)
from logdepth.runs import LoadedRun, RunConfig, RunFolder
from logdepth.runs.environment import environment, typed_command
from logdepth.timing import time_model
from logdepth.training import DivergedError, TrainState, repeatable

SAMPLING = SamplingConfig(max_tokens=120, temperature=0.8, top_p=0.95)
TIME_REPEATS, TIME_WARMUPS = 5, 1
CPU_TOKENS, CPU_LOGITS = 8_192, 2**28
"""Maximum tokens and logits of a batch that is timed on a CPU."""
PASSES_OF_A_STEP = 3
"""A training step of a token takes about as long as this many forward passes."""
ESTIMATE_TOKENS = 256
"""Maximum tokens of the batch from which the duration of a study is estimated."""


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """What has been measured of a run so far. It is kept in the run's folder until the result file is written."""

    step: int
    """The step of the weights that are measured."""
    test: tuple[Measured, ...] = ()
    positions: PositionLoss | None = None
    others: tuple[OtherText, ...] = ()

    @classmethod
    def kept(cls, folder: RunFolder, step: int) -> "Measurements":
        """Return the measurements of the weights of this step that are kept in a run's folder."""
        path = measurements_file(folder)
        if not path.is_file():
            return cls(step=step)
        remedy = "remove it to measure the run again"
        saved = read_json(path)
        if not isinstance(saved, dict):
            raise UserError(f"{path} is damaged; {remedy}")
        found = from_dict(cls, unseal(saved, path, remedy, required=True), str(path))
        return found if found.step == step else cls(step=step)

    def keep(self, folder: RunFolder) -> None:
        """Write the measurements to a run's folder."""
        write_json(measurements_file(folder), seal(to_dict(self)))

    def with_test(self, evaluation: Evaluation, *, positions: bool) -> "Measurements":
        """Return the measurements with one more evaluation of the test split."""
        kept = (one for one in self.test if one.context != evaluation.context)
        test = sorted((*kept, Measured.of(evaluation)), key=lambda one: one.context)
        return replace(self, test=tuple(test), positions=PositionLoss.of(evaluation) if positions else self.positions)


def measurements_file(folder: RunFolder) -> Path:
    """Return the path of the measurements of a run that is not completely measured."""
    return folder.path / "measurements.json"


def measure_run(
    study: Study,
    row: str,
    folder: RunFolder,
    state: TrainState,
    prepared: Prepared,
    others: Mapping[str, TokenStore],
    device: torch.device,
    on_progress: Callable[[float], None],
    check_budget: Callable[[], None],
) -> RunResult:
    """Evaluate a run's best weights at all lengths and on `others`, and generate samples from them.

    `on_progress` receives the completed fraction. `check_budget` is called between evaluations and may raise.
    """
    assert state.best_step is not None
    assert state.finished is not None
    loaded = folder.load("best", device)
    with repeatable(device, loaded.config.train.deterministic):
        measured = kept = Measurements.kept(folder, state.best_step)
        for measured in _completed(kept, study, loaded, prepared.stores["test"], others, on_progress):
            measured.keep(folder)
            check_budget()
        samples = _samples(loaded, study.prompt)
    assert measured.positions is not None
    metrics = folder.read_metrics()
    if not any(line["kind"] == "valid" and line["step"] == state.best_step for line in metrics):
        raise UserError(
            f"{folder.metrics} lacks the validation at step {state.best_step}; restore it from a copy, or remove "
            f"{shlex.quote(str(folder.path))} to train that run again"
        )
    speeds = [line["tokens_per_second"] for line in metrics if line["kind"] == "train"]
    return RunResult(
        recipe=study.recipe(row),
        row=row,
        config=loaded.config,
        parameters=num_parameters(loaded.model),
        data=DataFacts.of(prepared),
        environment={name: fact for name, fact in folder.environment().items() if name != "command"},
        steps=state.step,
        best_step=state.best_step,
        finished=state.finished,
        valid_loss=state.best_loss,
        test=tuple(one for one in measured.test if one.context in study.contexts),
        positions=measured.positions,
        train_curve=_curve(metrics, "train", "loss"),
        valid_curve=_curve(metrics, "valid", "valid_loss"),
        samples=samples,
        others=tuple(one for name in others for one in measured.others if one.name == name),
        made=Made(
            command=typed_command(),
            at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            training_seconds=round(state.seconds, 1),
            tokens_per_second=round(statistics.median(speeds)) if speeds else None,
        ),
    )


def measure_times(
    study: Study,
    rows: Sequence[str],
    contexts: Sequence[int],
    device: torch.device,
    *,
    accelerated: bool,
    compiled: bool,
) -> Iterator[TimingResult]:
    """Time every model at every length; yield the result of each length.

    Models alternate, so that a temporary slowdown affects all of them.
    """
    configs = [study.rows[row] for row in rows]
    vocab_size = max(config.data.tokenizer.vocab_size for config in configs)
    models = [config.model.build(vocab_size).to(device) for config in configs]
    precision = configs[0].train.precision
    for model in models if compiled else ():
        compile_model(model, any_length=True)
    alternating = zip(
        *(
            time_model(
                model,
                contexts,
                batch_tokens=timed_tokens(study, vocab_size, device),
                precision=precision,
                accelerate=accelerated,
                repeats=TIME_REPEATS,
                warmups=TIME_WARMUPS,
            )
            for model in models
        ),
        strict=True,
    )
    for timings in alternating:
        yield TimingResult(
            corpus=study.corpus,
            what="forward",
            precision=precision,
            environment=environment(device),
            accelerated=accelerated,
            compiled=compiled,
            models=tuple(
                ModelTimings(recipe=study.recipe(row), row=row, parameters=num_parameters(model), timings=(timing,))
                for row, model, timing in zip(rows, models, timings, strict=True)
            ),
            made=typed_command(),
        )


def timed_tokens(study: Study, vocab_size: int, device: torch.device) -> int:
    """Return the number of tokens of a timed batch."""
    if device.type == "cpu":
        return min(study.time_tokens, CPU_TOKENS, CPU_LOGITS // vocab_size)
    return study.time_tokens


def seconds_per_token(config: RunConfig, vocab_size: int) -> float:
    """Time a forward pass per token on the CPU, roughly: a third of a small training step of an untrained model."""
    (timing,) = time_model(
        config.model.build(vocab_size),
        [min(config.train.context, ESTIMATE_TOKENS)],
        batch_size=1,
        what="train",
        precision=config.train.precision,
        accelerate=False,
        repeats=1,
        warmups=1,
    )
    return 1 / timing.tokens_per_second / PASSES_OF_A_STEP


def machine_slug(device: torch.device) -> str:
    """Return a part of a file name: the device, and a hash of everything that determines its speed."""
    facts = environment(device)
    relevant = [facts[name] for name in ("platform", "processor", "cores", "threads", "device", "torch", "cuda")]
    return f"{slug(str(facts['device']))}-{cache_key(relevant)[:6]}"


def _completed(
    measured: Measurements,
    study: Study,
    loaded: LoadedRun,
    test: TokenStore,
    others: Mapping[str, TokenStore],
    on_progress: Callable[[float], None],
) -> Iterator[Measurements]:
    """Make the evaluations that are missing, one by one; yield all measurements after each."""
    last = study.contexts[-1]
    at = {one.context for one in measured.test}
    if measured.positions is None or measured.positions.context != last:
        at.discard(last)
    missing = [context for context in study.contexts if context not in at]
    for number, context in enumerate(missing):

        def report(tokens: int, number: int = number) -> None:
            on_progress((number + tokens / len(test)) / len(missing))

        evaluation = _evaluation(loaded, test, context, "the test split", report)
        measured = measured.with_test(evaluation, positions=context == last)
        yield measured
    lengths = study.contexts_of_others(loaded.config.train.context)
    for name, store in others.items():
        text, rest = SplitFacts.of(store.info), tuple(one for one in measured.others if one.name != name)
        if any(one.text == text and [each.context for each in one.test] == lengths for one in measured.others):
            continue
        evaluations = [_evaluation(loaded, store, context, f"'{name}'", lambda _: None) for context in lengths]
        positions = PositionLoss.of(evaluations[-1])
        other = OtherText(name=name, text=text, test=tuple(map(Measured.of, evaluations)), positions=positions)
        measured = replace(measured, others=(*rest, other))
        yield measured


def _evaluation(
    loaded: LoadedRun, store: TokenStore, context: int, what: str, on_progress: Callable[[int], None]
) -> Evaluation:
    train = loaded.config.train
    found = evaluate(
        loaded.model,
        store,
        context=context,
        precision=train.precision,
        reset_at_documents=train.reset_at_documents,
        accelerate=train.accelerate and next(loaded.model.parameters()).device.type == "cuda",
        on_progress=on_progress,
    )
    if not math.isfinite(found.nats):
        raise DivergedError(f"the loss on {what} at {context:,} tokens is {found.nats}; choose other --contexts")
    return found


def _samples(loaded: LoadedRun, prompt: str) -> tuple[Sample, ...]:
    pieces = generate(
        loaded.model,
        loaded.tokenizer,
        [prompt],
        SAMPLING,
        separated=CORPORA[loaded.config.data.corpus].separated,
        precision=loaded.config.train.precision,
    )
    return (Sample(prompt=prompt, text="".join(piece.text for piece in pieces)),)


def _curve(metrics: list[dict[str, Any]], kind: str, field: str) -> tuple[CurvePoint, ...]:
    return tuple(CurvePoint(step=line["step"], loss=round(line[field], 6)) for line in metrics if line["kind"] == kind)
