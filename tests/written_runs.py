"""Runs on disk as training leaves them, with weights that were never trained."""

import dataclasses
from pathlib import Path
from typing import Any

import torch

from logdepth.data import prepare
from logdepth.models import ModelConfig
from logdepth.runs import RunConfig, RunFolder, TrainConfig
from tests.small_models import shake
from tests.tiny_corpus import tiny_data


def write_run(folder: Path, corpus: Path, model: ModelConfig, *, context: int = 16, **changes: Any) -> Path:
    """A run of a model on a tiny corpus; `changes` are fields of the config that its files say it has."""
    config = RunConfig(
        data=tiny_data(corpus), model=model, train=TrainConfig(context=context, init_from=folder / "first")
    )
    prepared = prepare(config.data)
    built = model.build(prepared.tokenizer.vocab_size)
    torch.manual_seed(0)
    shake(built, 0.2)
    run = RunFolder(folder)
    run.create(dataclasses.replace(config, **changes), prepared, torch.device("cpu"))
    run.save_weights("best", built.state_dict(), 7)
    run.append_metrics([{"kind": "valid", "step": step, "seconds": 1.0, "valid_loss": step / 2} for step in (4, 7, 9)])
    return folder
