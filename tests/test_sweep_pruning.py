"""Which trials of a sweep end early: those behind the others at the same place of their schedules."""

import json
from pathlib import Path
from typing import Any, cast

import optuna
import pytest
from optuna.trial import TrialState

from logdepth.runs import RunConfig, RunFolder
from logdepth.sweep import Search
from logdepth.sweep.study import open_study
from logdepth.sweep.watch import TrialWatch


class Raced:
    """Trials without training. Their loss falls from 2 to 1 over their schedule, however long that is."""

    def __init__(self, folder: Path) -> None:
        search = Search(recipe="r", config=RunConfig(), space={}, trials=9, out=folder, study="s")
        self.folder, self.study = folder, open_study(search, optuna.storages.InMemoryStorage())

    def watch(self) -> TrialWatch:
        trial, nothing = self.study.ask(), cast("Any", None)
        return TrialWatch(trial, nothing, RunFolder(self.folder / str(trial.number)), lambda _: nothing)

    def lasts(self, total_steps: int, every: int = 100, worse: float = 0.0) -> int:
        """How many steps a trial gets; `worse` is added to its loss."""
        watch = self.watch()
        watch.started(total_steps)
        try:
            for step in range(every, total_steps + 1, every):
                watch.validated(step, 2.0 - step / total_steps + worse, over=step + every > total_steps)
        except optuna.TrialPruned:
            self.study.tell(watch.trial, state=TrialState.PRUNED)
            return step
        self.study.tell(watch.trial, 1.0 + worse)
        return total_steps


def test_trials_are_compared_at_the_same_place_of_their_schedules(tmp_path: Path) -> None:
    raced = Raced(tmp_path)
    for number in range(5):
        assert raced.lasts(2000, worse=1e-3 * number) == 2000
    assert raced.lasts(8000) == 8000  # at step 2,000 it is far behind the others
    assert raced.lasts(2000, worse=0.1) == 500  # a quarter of the schedule is given to every trial
    assert raced.lasts(8000, worse=0.1) == 2000


@pytest.mark.parametrize("others_every", [10, 90, 100, 300])
def test_it_does_not_matter_how_often_trials_are_validated(others_every: int, tmp_path: Path) -> None:
    raced = Raced(tmp_path)
    for _ in range(5):
        raced.lasts(1800, every=others_every)
    for every in (10, 90, 100, 180, 300):
        assert raced.lasts(1800, every=every, worse=-1e-6) == 1800


def test_few_trials_prune_nobody(tmp_path: Path) -> None:
    raced = Raced(tmp_path)
    for _ in range(5):  # complete, but from before places were reported
        raced.study.tell(raced.study.ask(), 0.5)
    for number in range(5):
        assert raced.lasts(2000, worse=0.1 * number) == 2000
    assert raced.lasts(2000, worse=1.0) == 500


def test_a_run_that_is_over_is_not_pruned(tmp_path: Path) -> None:
    raced = Raced(tmp_path)
    for _ in range(5):
        raced.lasts(2000)
    watch = raced.watch()
    watch.started(2000)
    watch.validated(1000, 9.0, over=True)  # stopped early
    with pytest.raises(optuna.TrialPruned):
        watch.validated(1100, 9.0, over=False)


def test_a_trial_that_goes_on_reports_what_was_measured_before(tmp_path: Path) -> None:
    watch = Raced(tmp_path).watch()
    watch.folder.path.mkdir()
    lines = [{"kind": "valid", "step": step, "seconds": 1.0, "valid_loss": 3.0 - step / 100} for step in (50, 100, 150)]
    watch.folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    watch.started(400)
    values = watch.trial.study.trials[0].intermediate_values
    assert list(values) == [1, 2, 3, 4, 5, 6, 7]  # of twenty
    assert values[7] == pytest.approx(3.0 - 140 / 100)
