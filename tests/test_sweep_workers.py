"""Workers of a sweep that die, or work side by side: every trial is done, and done once."""

import json
import random
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.trial import TrialState
from sqlalchemy.exc import OperationalError

import logdepth.sweep.heartbeat as heartbeat
import logdepth.sweep.storage as storage
import logdepth.sweep.worker as worker
from logdepth.cli import main
from logdepth.config import override, to_dict
from logdepth.recipes import recipe
from logdepth.runs import RunFolder
from logdepth.sweep import Search, parse_space
from logdepth.sweep.ledger import RETRY_OF, retry_of
from logdepth.sweep.storage import _JournalLock, open_storage
from logdepth.sweep.watch import NUM_REPORT_POINTS, TrialWatch
from logdepth.training import TrainState
from tests.run_folders import measured
from tests.sweep_processes import (
    RECIPE,
    STEPS,
    each_done_once,
    finish,
    flags,
    quick_looks,  # noqa: F401
    record_own_trials,
    start,
    steps_in,
    training_in_no_time,  # noqa: F401
    trials_of,
    wait_for_step,
)
from tests.tiny_corpus import tiny_data


class KilledError(BaseException):
    """What is left of a SIGKILL when it comes to a thread of this process: nothing more is written."""


class Mortal(JournalStorage):
    """A journal whose process is killed before it writes one more than `left` lines."""

    left = 10**9

    def _write_log(self, op_code: int, extra_fields: dict[str, Any]) -> None:
        if Mortal.left <= 0:
            raise KilledError
        Mortal.left -= 1
        super()._write_log(op_code, extra_fields)


@pytest.fixture
def mortal(trained: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    def open_mortal(url: str | None, journal: Path) -> Mortal:
        journal.parent.mkdir(parents=True, exist_ok=True)
        return Mortal(open_storage(None, journal)._backend)  # type: ignore[attr-defined]

    monkeypatch.setattr(worker, "open_storage", open_mortal)
    yield trained
    Mortal.left = 10**9


def test_killed_between_any_two_writes(
    mortal: list[int], corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = ["--space", "train.learning_rate=1e-3:1e-2:log", "--grace", "0.01"]
    whole = tmp_path / "whole"
    assert main(flags(corpus, whole, "--trials", "3", *space)) == 0
    writes = 10**9 - Mortal.left
    expected = [row | {"attempts": 0} for row in json.loads((whole / "sweep.json").read_text())["trials"]]
    assert writes > 15
    seed = random.randrange(10**6)
    print("seed", seed)  # shown when it fails
    chance = random.Random(seed)
    for first in range(1, writes):
        mortal.clear()
        out = tmp_path / f"killed-{first}"
        for left in (first, chance.randrange(1, 20)):
            Mortal.left = left
            try:
                main(flags(corpus, out, "--trials", "3", *space))
            except KilledError:
                continue
        Mortal.left = 10**9
        assert main(flags(corpus, out, "--trials", "3", *space)) == 0
        each_done_once(trials_of(out), 3)
        rows = json.loads((out / "sweep.json").read_text())["trials"]
        # A retry takes a number, and with the number comes the seed: only what was never interrupted must be the same.
        assert len(rows) == 3
        assert [row["loss"] for row in rows] == [row["params"]["train.learning_rate"] for row in rows]
        assert rows[0] | {"attempts": 0} == expected[0]


def test_what_failed_and_was_queued_twice_is_done_once(mortal: list[int], corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    space = ["--space", "train.learning_rate=1e-3:1e-2:log"]
    assert main(flags(corpus, out, "--trials", "1", *space)) == 0
    study = optuna.load_study(study_name=RECIPE, storage=open_storage(None, out / "journal.log"))
    for _ in range(2):  # two that failed and were left alone
        trial = study.ask()
        trial.suggest_float("train.learning_rate", 1e-3, 1e-2, log=True)
        study.tell(trial, state=TrialState.FAIL)
    failed, left_alone = study.trials[1:]
    for _ in range(3):  # three workers that saw the same
        study.enqueue_trial(*retry_of(failed))
    mortal.clear()
    assert main(flags(corpus, out, "--trials", "4", *space)) == 0
    assert len(mortal) == 3
    assert each_done_once(trials_of(out), 4)[:3] == [0, 1, 2]
    rows = json.loads((out / "sweep.json").read_text())["trials"]
    assert rows[1]["params"] == failed.params
    assert rows[2]["params"] == left_alone.params


def test_a_trial_that_kills_its_workers_is_given_up(
    mortal: list[int], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, space = tmp_path / "sweep", ["--space", "train.learning_rate=1e-3:1e-2:log", "--grace", "0.01"]
    in_no_time = worker.Worker._train

    def deadly(self: worker.Worker, config: Any, folder: RunFolder, watch: Any) -> TrainState:
        if folder.path.name == "0000":
            Mortal.left = 0
            raise KilledError
        return in_no_time(self, config, folder, watch)

    monkeypatch.setattr(worker.Worker, "_train", deadly)
    for _ in range(worker.MAX_DEATHS):
        with pytest.raises(KilledError):
            main(flags(corpus, out, "--trials", "2", *space))
        Mortal.left = 10**9
    assert main(flags(corpus, out, "--trials", "2", *space)) == 0
    rows = json.loads((out / "sweep.json").read_text())["trials"]
    assert [row["state"] for row in rows] == ["pruned", "complete"]
    assert rows[0]["reason"] == "given up: 3 workers died while running it"
    each_done_once(trials_of(out), 2)


def test_fields_that_do_not_fit_together_are_pruned(mortal: list[int], corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    space = ["--space", "model.operator.width=16,17", "model.embedding_net=false,true"]
    more = ["--trials", "12", "--model.no-embedding-net", "--no-prune"]
    assert main(flags(corpus, out, *more, *space)) == 0
    rows = json.loads((out / "sweep.json").read_text())["trials"]
    wrong = [row for row in rows if row["params"] == {"model.operator.width": 17, "model.embedding_net": True}]
    assert wrong
    assert wrong == [row for row in rows if row["state"] == "pruned"]
    assert "which must be even; got 17" in wrong[0]["reason"]


def test_two_workers_propose_different_points(trained: list[int], corpus: Path, tmp_path: Path) -> None:
    """Also when both know the same: the seed of a trial is its number's."""
    out, space = tmp_path / "sweep", ["--space", "train.learning_rate=1e-3:1e-2:log"]
    assert main(flags(corpus, out, "--trials", "6", *space)) == 0
    again = tmp_path / "again"
    assert main(flags(corpus, again, "--trials", "6", *space)) == 0
    one, other = (json.loads((path / "sweep.json").read_text())["trials"] for path in (out, again))
    assert one == other
    assert len({row["params"]["train.learning_rate"] for row in one}) == 6


def test_a_trial_declared_dead_is_left_to_others(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "sweep"
    monkeypatch.setattr(heartbeat, "BEAT_SECONDS", 0.05)
    original = TrialWatch.validated
    taken: list[int] = []

    def taken_over(self: TrialWatch, step: int, loss: float, *, over: bool) -> None:
        if not taken:
            taken.append(step)
            study = optuna.load_study(study_name=RECIPE, storage=open_storage(None, out / "journal.log"))
            study.tell(0, state=TrialState.FAIL)
            end = time.monotonic() + 10
            while not self.heart.lost:
                assert time.monotonic() < end
                time.sleep(0.01)
            return
        original(self, step, loss, over=over)

    monkeypatch.setattr(TrialWatch, "validated", taken_over)
    assert main(flags(corpus, out, "--trials", "1")) == 0
    assert "trial 0: another worker has taken it over" in capsys.readouterr().err
    each_done_once(trials_of(out), 1)
    assert steps_in(out, 0) == list(range(1, STEPS + 1))


@pytest.mark.parametrize("kept", ["journal", "sqlite"])
def test_two_workers_at_once(kept: str, corpus: Path, tmp_path: Path, own_trials: list[int]) -> None:
    out = tmp_path / "sweep"
    url = None if kept == "journal" else f"sqlite:///{tmp_path}/study.db"
    more = ["--trials", "6", "--train.max-steps", "24", "--no-prune", *(["--storage", url] if url else [])]
    process = start(corpus, out, *more)
    wait_for_step(process, out, 0, 1)
    assert main(flags(corpus, out, *more)) == 0
    finish(process)
    trials = trials_of(out, url)
    origins = each_done_once(trials, 6)
    assert not any(RETRY_OF in trial.user_attrs for trial in trials)
    assert 0 < len(own_trials) < 6
    for origin in origins:
        assert steps_in(out, origin) == list(range(1, 25))
    assert len(json.loads((out / "sweep.json").read_text())["trials"]) == 6


@pytest.fixture
def own_trials(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The trials that a worker in this process has begun or gone on with."""
    return record_own_trials(monkeypatch)


def test_many_workers_in_a_hurry(trained: list[int], corpus: Path, tmp_path: Path) -> None:
    """Threads that all do what workers do, on trials that take no time: races at every turn."""
    out, count = tmp_path / "sweep", 12
    search = Search(
        recipe=RECIPE,
        config=override(recipe(RECIPE), {"data": to_dict(tiny_data(corpus))}),
        space=parse_space(["train.learning_rate=1e-3:1e-2:log"], recipe(RECIPE)),
        trials=count,
        out=out,
        study=RECIPE,
        prune=False,
    )
    with ThreadPoolExecutor(4) as pool:
        for record in pool.map(worker.work, [search] * 4):
            assert len(record["trials"]) == count
    origins = each_done_once(trials_of(out), count)
    assert sorted(trained) == origins
    assert sorted(row["trial"] for row in json.loads((out / "sweep.json").read_text())["trials"]) == origins


def test_a_killed_worker_loses_nothing(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_trials: list[int]
) -> None:
    more = ["--trials", "2", "--train.max-steps", "48", "--no-prune"]
    out = tmp_path / "killed"
    process = start(corpus, out, *more)
    wait_for_step(process, out, 1, 14)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    resumed = []
    original = worker.resume

    def recorded(path: Path, *rest: Any) -> TrainState:
        resumed.append(path.name)
        return original(path, *rest)

    monkeypatch.setattr(worker, "resume", recorded)
    assert main(flags(corpus, out, *more, "--grace", "1e6")) == 0  # on this machine nobody waits for the grace period
    assert resumed == ["0001"]
    assert own_trials == [1]
    each_done_once(trials_of(out), 2)
    whole = tmp_path / "whole"
    assert main(flags(corpus, whole, *more)) == 0
    killed, expected = (json.loads((path / "sweep.json").read_text())["trials"] for path in (out, whole))
    assert [row["attempts"] for row in killed] == [1, 2]
    for trial in (0, 1):
        assert killed[trial]["loss"] == expected[trial]["loss"]
        assert measured(out / "trials" / f"000{trial}") == measured(whole / "trials" / f"000{trial}")
    last = trials_of(out)[-1]
    # Those from before the kill too.
    assert sorted(last.intermediate_values) == list(range(1, NUM_REPORT_POINTS + 1))


def test_a_line_that_a_kill_cut_off_is_removed(trained: list[int], corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    assert main(flags(corpus, out, "--trials", "1")) == 0
    journal = out / "journal.log"
    with journal.open("ab") as file:
        file.write(b'{"op_code":8,"worker_id":"gone","tri')
    assert main(flags(corpus, out, "--trials", "2")) == 0
    each_done_once(trials_of(out), 2)
    assert all(json.loads(line) for line in journal.read_text().splitlines())


def test_a_trial_whose_end_was_cut_off_the_journal_is_run_again_at_once(
    trained: list[int], corpus: Path, tmp_path: Path
) -> None:
    out = tmp_path / "sweep"
    assert main(flags(corpus, out, "--trials", "2")) == 0
    before = json.loads((out / "sweep.json").read_text())
    journal = out / "journal.log"
    journal.write_bytes(journal.read_bytes()[:-20])
    assert [trial.state for trial in trials_of(out)] == [TrialState.COMPLETE, TrialState.RUNNING]
    assert main(flags(corpus, out, "--trials", "2", "--grace", "1e9")) == 0  # a worker of this machine has no grace
    after = json.loads((out / "sweep.json").read_text())
    assert [row["attempts"] for row in after["trials"]] == [1, 2]
    assert [row["loss"] for row in after["trials"]] == [row["loss"] for row in before["trials"]]


def test_one_writes_to_a_journal_at_a_time(tmp_path: Path) -> None:
    one, other = (_JournalLock(tmp_path / "journal.log") for _ in range(2))
    order = []
    one.acquire()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(lambda: (other.acquire(), order.append("other")))
        time.sleep(0.05)
        order.append("one")
        one.release()
        waiting.result()
    other.release()
    assert order == ["one", "other"]


def test_one_uses_sqlite_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From its first look on: two must not see the same trial as free."""
    monkeypatch.setattr(storage, "SQLITE_SECONDS", 0.01)
    one, other = (open_storage(f"sqlite:///{tmp_path}/study.db", tmp_path).engine for _ in range(2))  # type: ignore[attr-defined]
    with one.begin() as looking:
        looking.exec_driver_sql("SELECT * FROM trials")
        with pytest.raises(OperationalError, match="locked"), other.begin():
            pass
    with other.begin():
        pass


def test_no_wait_leaves_the_trials_of_others(trained: list[int], corpus: Path, tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    assert main(flags(corpus, out, "--trials", "1")) == 0
    study = optuna.load_study(study_name=RECIPE, storage=open_storage(None, out / "journal.log"))
    study.ask()  # by someone far away
    assert main(flags(corpus, out, "--trials", "2", "--no-wait")) == 0
    assert [row["state"] for row in json.loads((out / "sweep.json").read_text())["trials"]] == ["complete", "running"]
    assert main(flags(corpus, out, "--trials", "2", "--grace", "0.1")) == 0
    assert each_done_once(trials_of(out), 2) == [0, 1]
