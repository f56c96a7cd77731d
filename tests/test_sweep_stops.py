"""Workers of a sweep that are stopped, or cannot go on: they give their trial back."""

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.trial import TrialState

import logdepth.sweep.worker as worker
from logdepth.cli import main
from logdepth.errors import UserError
from logdepth.sweep.storage import open_storage
from logdepth.sweep.watch import TrialWatch
from logdepth.training import Trainer, TrainState
from tests.command_line import refused
from tests.sweep_processes import (
    RECIPE,
    STEPS,
    each_done_once,
    flags,
    quick_looks,  # noqa: F401
    steps_in,
    training_in_no_time,  # noqa: F401
    trials_of,
)


@contextlib.contextmanager
def given_back(out: Path, training: Callable[..., TrainState], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A block with trainings of this kind, after which the one trial of the sweep waits for another worker."""
    with monkeypatch.context() as patch:
        patch.setattr(worker.Worker, "_train", training)
        yield
    assert [trial.state for trial in trials_of(out)] == [TrialState.FAIL, TrialState.WAITING]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_give_the_trial_back(
    number: signal.Signals,
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "sweep"
    original = Trainer._step

    def stopping(self: Trainer) -> None:
        original(self)
        if self.state.step == 8:
            signal.raise_signal(number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_step", stopping)
        assert main(flags(corpus, out, "--trials", "1")) == 128 + number
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last == f"stopped by {number.name}; saved. Run the same command again to continue."
    failed, waiting = trials_of(out)
    assert (failed.state, waiting.state) == (TrialState.FAIL, TrialState.WAITING)
    assert steps_in(out, 0)[-1] == 8
    assert main(flags(corpus, out, "--trials", "1")) == 0
    (row,) = json.loads((out / "sweep.json").read_text())["trials"]
    assert (row["state"], row["attempts"], row["steps"]) == ("complete", 2, STEPS)
    assert steps_in(out, 0) == list(range(1, STEPS + 1))
    assert trials_of(out)[-1].user_attrs["deaths"] == 0


def test_a_signal_that_comes_while_compiling(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "sweep"

    def compiling(*_: Any) -> TrainState:
        try:
            signal.raise_signal(signal.SIGTERM)
        except Exception as error:  # as torch's compiler does
            raise RuntimeError("cannot compile") from error
        raise AssertionError("the signal did nothing")

    with given_back(out, compiling, monkeypatch):
        assert main(flags(corpus, out, "--trials", "1")) == 128 + signal.SIGTERM
        assert "stopped by SIGTERM" in capsys.readouterr().err


def test_a_signal_while_waiting_for_others(
    trained: list[int], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "sweep"
    assert main(flags(corpus, out, "--trials", "1")) == 0
    optuna.load_study(study_name=RECIPE, storage=open_storage(None, out / "journal.log")).ask()  # by someone far away
    monkeypatch.setattr(worker.time, "sleep", lambda _: signal.raise_signal(signal.SIGTERM))
    assert main(flags(corpus, out, "--trials", "2")) == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_worker_that_cannot_go_on_gives_its_trial_back(
    trained: list[int],
    corpus: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "sweep"

    def no_room(*_: Any) -> TrainState:
        raise UserError("no room left to write; free some space")

    with given_back(out, no_room, monkeypatch):
        assert "no room left to write" in refused(capsys, *flags(corpus, out, "--trials", "1"))
    assert main(flags(corpus, out, "--trials", "1")) == 0
    assert each_done_once(trials_of(out), 1) == [0]


def test_a_database_that_goes_away_in_a_trial(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "sweep"

    def gone(*_: Any, **__: Any) -> None:
        raise optuna.exceptions.StorageInternalError("the server went away")

    with monkeypatch.context() as patch:
        patch.setattr(TrialWatch, "validated", gone)
        patch.setattr(optuna.Study, "tell", gone)
        line = refused(capsys, *flags(corpus, out, "--trials", "1"))
    assert "cannot be used (the server went away); check --storage and run the same command again" in line
    assert [trial.state for trial in trials_of(out)] == [TrialState.RUNNING]  # nobody could be told
    assert main(flags(corpus, out, "--trials", "1", "--grace", "1e6")) == 0
    (row,) = json.loads((out / "sweep.json").read_text())["trials"]
    assert (row["state"], row["attempts"]) == ("complete", 2)
    assert steps_in(out, 0) == list(range(1, STEPS + 1))
    assert list((out / "workers").iterdir()) == []
