"""Evaluate a finished run for its result file, and time all models of a study together."""

import datetime
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from logdepth.acceleration import compile_model
from logdepth.data import CORPORA, Prepared, TokenStore
from logdepth.data.cache import cache_key
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
from logdepth.runs import LoadedRun, RunFolder
from logdepth.runs.environment import environment, typed_command
from logdepth.timing import Timing, time_model
from logdepth.training import TrainState, repeatable

SAMPLING = SamplingConfig(max_tokens=120, temperature=0.8, top_p=0.95)
TIME_REPEATS, TIME_WARMUPS = 5, 1
CPU_TOKENS, CPU_LOGITS = 8_192, 2**28
"""Maximum tokens and logits of a batch that is timed on a CPU."""


def measure_run(
    study: Study,
    row: str,
    folder: RunFolder,
    state: TrainState,
    prepared: Prepared,
    others: Mapping[str, TokenStore],
    device: torch.device,
    on_progress: Callable[[float], None],
) -> RunResult:
    """Evaluate a run's best weights at all lengths and on `others`, and generate samples from them.

    `on_progress` receives the completed fraction.
    """
    loaded = folder.load("best", device)
    accelerate = loaded.config.train.accelerate and device.type == "cuda"
    with repeatable(device, loaded.config.train.deterministic):
        evaluations = _evaluations(loaded, prepared.stores["test"], study.contexts, accelerate, on_progress)
        ends = sorted({loaded.config.train.context, study.contexts[-1]})
        on_others = {
            name: _evaluations(loaded, store, ends, accelerate, lambda _: None) for name, store in others.items()
        }
        samples = _samples(loaded, study.prompt)
    assert state.best_step is not None
    assert state.finished is not None
    metrics = folder.read_metrics()
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
        test=tuple(Measured.of(one) for one in evaluations),
        positions=PositionLoss.of(evaluations[-1]),
        train_curve=_curve(metrics, "train", "loss"),
        valid_curve=_curve(metrics, "valid", "valid_loss"),
        samples=samples,
        others=tuple(
            OtherText(name=name, text=SplitFacts.of(others[name].info), test=tuple(map(Measured.of, found)))
            for name, found in on_others.items()
        ),
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
    device: torch.device,
    on_progress: Callable[[float], None],
    *,
    accelerated: bool,
    compiled: bool,
) -> TimingResult:
    """Time every model at every length. Models alternate, so that a temporary slowdown affects all of them."""
    configs = [study.rows[row] for row in rows]
    vocab_size = max(config.data.tokenizer.vocab_size for config in configs)
    models = [config.model.build(vocab_size).to(device) for config in configs]
    precision = configs[0].train.precision
    for model in models if compiled else ():
        compile_model(model, any_length=True)
    tokens = study.time_tokens
    if device.type == "cpu":
        tokens = min(tokens, CPU_TOKENS, CPU_LOGITS // vocab_size)
    alternating = zip(
        *(
            time_model(
                model,
                study.time_contexts,
                batch_tokens=tokens,
                precision=precision,
                accelerate=accelerated,
                repeats=TIME_REPEATS,
                warmups=TIME_WARMUPS,
            )
            for model in models
        ),
        strict=True,
    )
    found: list[Sequence[Timing]] = []
    for timings in alternating:
        found.append(timings)
        on_progress(len(found) / len(study.time_contexts))
    return TimingResult(
        corpus=study.corpus,
        what="forward",
        precision=precision,
        environment=environment(device),
        accelerated=accelerated,
        compiled=compiled,
        models=tuple(
            ModelTimings(
                recipe=study.recipe(row),
                row=row,
                parameters=num_parameters(model),
                timings=tuple(timings[place] for timings in found),
            )
            for place, (row, model) in enumerate(zip(rows, models, strict=True))
        ),
        made=typed_command(),
    )


def machine_slug(device: torch.device) -> str:
    """Return a part of a file name: the device, and a hash of everything that determines its speed."""
    facts = environment(device)
    relevant = [facts[name] for name in ("platform", "processor", "cores", "threads", "device", "torch", "cuda")]
    return f"{slug(str(facts['device']))}-{cache_key(relevant)[:6]}"


def _evaluations(
    loaded: LoadedRun,
    test: TokenStore,
    contexts: Sequence[int],
    accelerate: bool,
    on_progress: Callable[[float], None],
) -> list[Evaluation]:
    train = loaded.config.train
    found = []
    for number, context in enumerate(contexts):
        done = number / len(contexts)
        found.append(
            evaluate(
                loaded.model,
                test,
                context=context,
                precision=train.precision,
                reset_at_documents=train.reset_at_documents,
                accelerate=accelerate,
                on_progress=lambda tokens, done=done: on_progress(  # type: ignore[misc]
                    done + tokens / len(test) / len(contexts)
                ),
            )
        )
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
