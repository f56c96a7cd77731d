"""Builds a folder of made-up results (studies, a sweep, associativity) for tests of the results pages."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from logdepth.associativity import Associativity, Distance, InParts, Law
from logdepth.evaluate import evaluate
from logdepth.recipes import RECIPES, parameters_of, rows_of
from logdepth.results import RunResult, TimingResult, write_result
from tests.small_models import SMALL_MODELS, VOCAB
from tests.test_associativity import TOKENS
from tests.tiny_corpus import store_of
from tests.tiny_study import made_up_run, made_up_times

MODELS = ("ar-grc", "ar-mlp-ldru", "transformer-alibi", "transformer-sinusoidal")


def a_run(study: str, row: str, seed: int, perplexity: float = 20.0) -> RunResult:
    """Return a made-up run: perplexity at 2,976 tokens is half that at 512, except with sinusoidal positions."""
    corpus = study.split("-")[0]
    run = made_up_run(row, seed, perplexity)
    config = dataclasses.replace(RECIPES[f"{corpus}-{row}"](), seed=seed)
    beyond = 3.0 if row == "transformer-sinusoidal" else 0.5
    measured = [
        dataclasses.replace(
            run.test[0],
            context=context,
            token_perplexity=perplexity * (beyond if context == 2976 else 1),
            word_perplexity=4 * perplexity,
            bits_per_byte=perplexity / 20,
        )
        for context in sorted({*range(32, 2977, 128), 512})
    ]
    return dataclasses.replace(
        run,
        recipe=f"{corpus}-{row}",
        config=config,
        parameters=parameters_of(config),
        data=dataclasses.replace(run.data, corpus=corpus),
        test=tuple(measured),
    )


def a_timing(study: str) -> TimingResult:
    times = made_up_times(*MODELS)
    models = [
        dataclasses.replace(
            model,
            timings=tuple(dataclasses.replace(model.timings[0], context=context) for context in range(32, 2977, 128)),
        )
        for model in times.models
    ]
    return dataclasses.replace(times, corpus=study.split("-")[0], models=tuple(models), compiled=True)


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
