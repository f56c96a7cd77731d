"""Small runs: making them, stopping them, comparing them on disk."""

import dataclasses
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from logdepth.models import ModelConfig
from logdepth.runs import RunConfig, RunFolder, TrainConfig
from logdepth.training import Interrupted, Trainer
from tests.small_models import SCAN
from tests.tiny_corpus import tiny_data


def same_files(one: Path, other: Path) -> None:
    """Two runs ended in the same bits."""
    for name in ("best", "last", "checkpoint"):
        left, right = (load_file(folder / f"{name}.safetensors") for folder in (one, other))
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left), name
    assert measured(one) == measured(other)


def measured(folder: Path) -> list[dict[str, Any]]:
    """The metrics, without what a clock said."""
    lines = RunFolder(folder).read_metrics()
    return [{key: value for key, value in line.items() if "second" not in key} for line in lines]


TRAIN = TrainConfig(
    learning_rate=1e-2, max_steps=24, evaluate_every=8, batch_size=8, context=16, log_every=4, device="cpu"
)


def run_config(corpus: Path, model: ModelConfig = SCAN, **changes: Any) -> RunConfig:
    return RunConfig(data=tiny_data(corpus), model=model, train=dataclasses.replace(TRAIN, **changes))


@contextmanager
def interrupted_at(step: int, number: signal.Signals) -> Iterator[None]:
    """Training that gets a signal after a step, and stops."""
    original = Trainer._step

    def stopping(self: Trainer) -> None:
        original(self)
        if self.state.step == step:
            os.kill(os.getpid(), number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_step", stopping)
        with pytest.raises(Interrupted) as stopped:
            yield
    assert stopped.value.step == step
