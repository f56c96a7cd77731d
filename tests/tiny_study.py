"""A small study of a small corpus, for tests: what to type, and results without any training."""

import dataclasses
import json
import math
from pathlib import Path

from logdepth.recipes import RECIPES, parameters_of, rows_of
from logdepth.results import (
    CurvePoint,
    DataFacts,
    Made,
    Measured,
    ModelTimings,
    PositionLoss,
    RunResult,
    Sample,
    SplitFacts,
    TimingResult,
)
from logdepth.solving import Accuracy, TaskResult
from logdepth.tasks import TASKS
from logdepth.timing import Timing
from tests.small_models import TINY
from tests.tiny_corpus import VOCAB

TRAINING = {
    "max_steps": 30,
    "evaluate_every": 6,
    "batch_size": 8,
    "context": 32,
    "log_every": 1,
    "warmup_steps": 5,
    "learning_rate": 1e-2,
    "device": "cpu",
}
CONTEXTS = (16, 32, 64)
TIME_TOKENS = 256


def override_files(folder: Path, corpus: Path) -> list[str]:
    """`--config …` that makes the study of `text` small: one file for all models, one for each."""
    folder.mkdir(parents=True, exist_ok=True)
    everyone = folder / "everyone.json"
    data = {"paths": [str(corpus)], "tokenizer": {"vocab_size": VOCAB, "lossless": False}}
    everyone.write_text(json.dumps({"data": data, "train": TRAINING}))
    files = [everyone]
    sizes = {
        "ScanLMConfig": {"embed_width": TINY.embed_width, "operator": {"width": TINY.state_width}},
        "TransformerConfig": {
            "embed_width": TINY.layer_width,
            "num_layers": TINY.num_layers,
            "num_heads": TINY.num_heads,
        },
    }
    for row in rows_of("text"):
        kind = type(RECIPES[f"text-{row}"]().model).__name__
        file = folder / f"{row}.json"
        file.write_text(json.dumps({"recipe": f"text-{row}", "config": {"model": sizes[kind]}}))
        files.append(file)
    return ["--config", *map(str, files)]


def measured(context: int, perplexity: float, text: SplitFacts) -> Measured:
    """A made-up evaluation of a text with this perplexity. All other numbers follow from it."""
    tokens = text.tokens - 1
    nats = tokens * math.log(perplexity)
    return Measured(
        context=context,
        tokens=tokens,
        nats=nats,
        loss=nats / tokens,
        token_perplexity=math.exp(nats / tokens),
        word_perplexity=math.exp(nats / (text.words + text.line_ends)),
        bits_per_byte=nats / math.log(2) / text.bytes,
    )


def positions_of(whole: Measured) -> PositionLoss:
    """Made-up losses by position that add up to an evaluation. Nothing was predicted at the second position."""
    windows, rest = divmod(whole.tokens, whole.context)
    tokens = [windows + (place < rest) for place in range(min(whole.context, whole.tokens))]
    tokens[:2] = [sum(tokens[:2]), 0]
    nats = tuple(round(whole.loss, 6) if count else None for count in tokens)
    return PositionLoss(context=whole.context, nats=nats, tokens=tuple(tokens))


def made_up_run(row: str = "ar-grc", seed: int = 0, perplexity: float = 20.0) -> RunResult:
    """A result as if measured: the perplexity grows a little with the context length."""
    config = dataclasses.replace(RECIPES[f"ptb-{row}"](), seed=seed)
    split = SplitFacts(tokens=1000, unknown=0, words=500, line_ends=10, bytes=3600, documents=1, sha256="ab" * 32)
    test = tuple(measured(context, perplexity + context / 512, split) for context in (32, 512, 2976))
    return RunResult(
        recipe=f"ptb-{row}",
        row=row,
        config=config,
        parameters=parameters_of(config),
        data=DataFacts(
            corpus="ptb",
            store="ptb-1500-0",
            tokenizer_hash="cd" * 8,
            vocab_size=1500,
            separator=None,
            splits=dict.fromkeys(("train", "valid", "test"), split),
        ),
        environment={"device": "cpu", "threads": 2, "torch": "2"},
        steps=100,
        best_step=100,
        finished="all steps done",
        valid_loss=3.0,
        test=test,
        positions=positions_of(test[-1]),
        train_curve=(CurvePoint(step=50, loss=3.5),),
        valid_curve=(CurvePoint(step=50, loss=3.4), CurvePoint(step=100, loss=3.0)),
        samples=(Sample(prompt="the", text=" cat <b>sat</b> & left"),),
        made=Made(
            command="logdepth reproduce ptb",
            at="2030-01-01T00:00:00+00:00",
            training_seconds=60.0,
            tokens_per_second=None,
        ),
    )


def made_up_timing(context: int) -> Timing:
    timing = {"batch_size": 4, "milliseconds": 2.0, "fastest": 1.5, "lower_quartile": 1.8, "upper_quartile": 2.5}
    return Timing(context=context, repeats=3, tokens_per_second=2e3 * context, attention=None, **timing)


def made_up_times(*rows: str) -> TimingResult:
    timings = tuple(made_up_timing(context) for context in (32, 512))
    return TimingResult(
        corpus="ptb",
        what="forward",
        precision="auto",
        environment={"device": "cpu", "threads": 2, "torch": "2"},
        models=tuple(ModelTimings(recipe=f"ptb-{row}", row=row, parameters=10, timings=timings) for row in rows),
        made="logdepth reproduce ptb",
    )


def made_up_task_result(task: str, solver: str, seed: int, share: float) -> TaskResult:
    test = [
        Accuracy(length=case.length, items=case.items, sequences=1, asked=1000, right=round(1000 * share), last_right=1)
        for case in TASKS[task].test_cases
    ]
    return TaskResult(
        solver=solver,
        config={"task": task, "seed": seed},
        parameters=10,
        steps=5,
        finished="all steps done",
        curve=(),
        test=tuple(test),
    )
