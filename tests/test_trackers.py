"""Trackers of metrics."""

import sys
from pathlib import Path

import pytest

from logdepth.errors import UserError
from logdepth.training import train
from tests.run_folders import run_config


def test_tensorboard_gets_the_metrics(corpus: Path, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(run_config(corpus, trackers=("tensorboard",)), tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("valid_loss")] == [8, 16, 24]


def test_trackers_that_are_not_installed_are_refused(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(UserError, match=r"pip install '\.\[trackers\]'"):
        train(run_config(corpus, trackers=("wandb",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()
