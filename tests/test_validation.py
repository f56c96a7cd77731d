"""Validation during training: when it is due, and when it stops a run."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logdepth.runs import TrainConfig
from logdepth.runs.tensors import load_tensors
from logdepth.training import TrainState, train, validation
from logdepth.training.validation import Validation
from tests.run_folders import run_config
from tests.small_models import SMALL_MODELS
from tests.tiny_corpus import store_of


def test_early_stopping(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, losses = validation.evaluate, iter([3.0, 2.0, 2.5, 2.0, 2.1, 1.0])

    def scripted(*arguments: Any, **settings: Any) -> Any:
        result = real(*arguments, **settings)
        return dataclasses.replace(result, nats=next(losses) * result.tokens)

    monkeypatch.setattr(validation, "evaluate", scripted)
    state = train(run_config(corpus, max_steps=100, evaluate_every=2, patience=3), tmp_path)
    assert state.finished == "no better validation loss"
    assert (state.step, state.best_step, state.best_loss) == (10, 4, pytest.approx(2.0))
    records = {which: load_tensors(tmp_path / f"{which}.safetensors")[1] for which in ("best", "last")}
    assert {which: (record["step"], record["weights"]) for which, record in records.items()} == {
        "best": (4, "best"),
        "last": (10, "last"),
    }


def validation_of(every: int, total_steps: int, patience: int = 10) -> Validation:
    model = SMALL_MODELS["ar-grc"].build(13)
    config = TrainConfig(patience=patience)
    return Validation(model, store_of([1, 2, 3]), config, every=every, total_steps=total_steps)


@given(every=st.integers(1, 20), total_steps=st.integers(1, 60))
def test_validations_are_due_at_every_mark_and_at_the_end_once_each(every: int, total_steps: int) -> None:
    one, state, found = validation_of(every, total_steps), TrainState(), []
    for state.step in range(total_steps + 1):
        while one.is_due(state):
            found.append(state.step)
            one.record(state, 1.0)
    assert found == sorted({*range(every, total_steps + 1, every), total_steps})


@given(losses=st.lists(st.integers(0, 5).map(float), min_size=1, max_size=30), patience=st.integers(1, 5))
def test_the_best_validation_is_remembered_and_patience_ends_a_run(losses: list[float], patience: int) -> None:
    one, state, seen = validation_of(1, 1000, patience), TrainState(), []
    for state.step, loss in enumerate(losses, 1):
        is_best = one.record(state, loss)
        assert is_best == (not seen or loss < min(seen))
        seen.append(loss)
        assert state.validated == state.step
        assert state.best_loss == min(seen)
        assert state.best_step == seen.index(min(seen)) + 1
        assert state.without_better == state.step - state.best_step
        assert state.finished == ("no better validation loss" if state.without_better >= patience else None)
        if state.finished:
            break


def test_the_last_step_finishes_a_run() -> None:
    state = TrainState(step=7, best_loss=1.0, best_step=1, without_better=9)
    assert not validation_of(1, 7).record(state, 2.0)
    assert state.finished == "all steps done"
