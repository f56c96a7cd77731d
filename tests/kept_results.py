"""Builds a folder of made-up results (studies, a sweep, tasks, associativity) for tests of the results pages."""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from logdepth.associativity import Associativity, Distance, InParts, Law
from logdepth.evaluate import evaluate
from logdepth.recipes import RECIPES, parameters_of, rows_of
from logdepth.results import RunResult, TimingResult, write_result
from logdepth.solving import write_task_result
from tests.small_models import SMALL_MODELS, VOCAB
from tests.test_associativity import TOKENS
from tests.tiny_corpus import store_of
from tests.tiny_study import made_up_run, made_up_task_result, made_up_times, made_up_timing, measured, positions_of

MODELS = ("ar-grc", "ar-mlp-ldru", "transformer-alibi", "transformer-sinusoidal")
TOKENS_OF_A_TEXT = 10**9


def a_run(study: str, row: str, seed: int, perplexity: float = 20.0) -> RunResult:
    """Return a made-up run: perplexity at 2,976 tokens is half that at 512, except with sinusoidal positions.

    Its text has as many words and bytes as give a word perplexity of four times the perplexity, and bits per byte of a
    twentieth of it.
    """
    corpus = study.split("-")[0]
    run = made_up_run(row, seed, perplexity)
    config = dataclasses.replace(RECIPES[f"{corpus}-{row}"](), seed=seed)
    beyond = 3.0 if row == "transformer-sinusoidal" else 0.5
    nats = (TOKENS_OF_A_TEXT - 1) * math.log(perplexity)
    text = dataclasses.replace(
        run.data.splits["test"],
        tokens=TOKENS_OF_A_TEXT,
        words=round(nats / math.log(4 * perplexity)),
        line_ends=0,
        bytes=round(nats / math.log(2) / (perplexity / 20)),
    )
    contexts = sorted({*range(32, 2977, 128), 512})
    test = [measured(context, perplexity * (beyond if context == 2976 else 1), text) for context in contexts]
    return dataclasses.replace(
        run,
        recipe=f"{corpus}-{row}",
        config=config,
        parameters=parameters_of(config),
        data=dataclasses.replace(run.data, corpus=corpus, splits=run.data.splits | {"test": text}),
        test=tuple(test),
        positions=positions_of(test[-1]),
    )


def a_timing(study: str) -> TimingResult:
    corpus, times = study.split("-")[0], made_up_times(*MODELS)
    models = [
        dataclasses.replace(
            model,
            recipe=f"{corpus}-{model.row}",
            timings=tuple(made_up_timing(context) for context in range(32, 2977, 128)),
        )
        for model in times.models
    ]
    return dataclasses.replace(times, corpus=corpus, models=tuple(models), compiled=True)


def add_study(folder: Path, seeds: int = 3, models: tuple[str, ...] = MODELS, **perplexities: float) -> None:
    for number, row in enumerate(one for one in models if one in rows_of(folder.name.split("-")[0])):
        for seed in range(seeds):
            perplexity = perplexities.get(row.replace("-", "_"), 20.0 + number) + seed / 10
            write_result(folder / f"{row}-{seed}.json", a_run(folder.name, row, seed, perplexity))
    write_result(folder / "timing-cpu.json", a_timing(folder.name))


def add_sweep(path: Path, **changes: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    best = {
        "trial": 4,
        "state": "complete",
        "loss": 3.25,
        "params": {"train.learning_rate": 0.00123456, "dropout": 0.2},
    }
    record = {
        "recipe": "ptb-ar-grc",
        "space": {
            "train.learning_rate": {"low": 1e-4, "high": 1e-2, "step": None, "log": True},
            "dropout": {"low": 0.0, "high": 0.4, "step": 0.05, "log": False},
            "model.depth": [1, 2, None],
        },
        "config": {"train": {"max_steps": None, "epochs": 12}, "data": {"corpus": "ptb"}},
        "best": best,
        "trials": [best, {"trial": 5, "state": "pruned", "loss": None, "params": {}}],
    }
    path.write_text(json.dumps(record | changes))


GRC_AHEAD = {"grc": 1.0, "rope": 0.4}
"""Accuracies of models on a task of state tracking."""


def add_tasks(folder: Path, task: str = "s3", shares: Mapping[str, float] = GRC_AHEAD, seeds: int = 2) -> None:
    for solver, share in shares.items():
        for seed in range(seeds):
            write_task_result(folder, made_up_task_result(task, solver, seed, share))


def an_associativity(laws: tuple[Law, ...] = ("up", "down", "mixed")) -> Associativity:
    whole = evaluate(SMALL_MODELS["ar-grc"].build(VOCAB), store_of(TOKENS), context=250)
    parts = [whole, dataclasses.replace(whole, nats=whole.nats * 1.01)]
    worse = [dataclasses.replace(part, nats=part.nats * (1.02 + number / 100)) for number, part in enumerate(parts)]
    lost = [dataclasses.replace(whole, nats=math.inf)] * 2
    found = [Distance(0, law, level, 9, 0.25, 0.01, 0.5, 0.1, 0.9) for law in laws for level in (0, 1)]
    untrained = [[one._replace(distance=0.7 + seed / 10) for one in found] for seed in (0, 1)]
    trees = {"scan": InParts(parts), "left fold": InParts(worse), "offset 1": InParts(lost)}
    return Associativity(context=250, num_windows=16, distances=found, untrained=untrained, trees=trees)


def add_associativity(path: Path, found: Associativity) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(found.as_dict() | {"run": "studies/wikitext2/runs/ar-grc-0", "step": 9}))
