"""What a sweep wants of a trial's training: losses as they come, an end where one is due. It knows one trial only."""

from collections.abc import Callable

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import Trial

from logdepth.progress import Part
from logdepth.runs import RunFolder
from logdepth.sweep.heartbeat import Heartbeat
from logdepth.train import Watch


class QuietPart(Part):
    """A trial's share of the sweep; what training says of itself is in its metrics."""

    def say(self, line: str) -> None:
        pass


class TrialWatch(Watch):
    """Reports validation losses to the study, which may prune; stops where the trial is no longer ours."""

    def __init__(self, trial: Trial, heart: Heartbeat, folder: RunFolder, part: Callable[[int], Part]) -> None:
        self.trial, self.heart, self.folder, self.part = trial, heart, folder, part
        self.reported: set[int] = set()
        self.total_steps = 0

    def progress(self, total_steps: int, _done: int) -> Part:
        self.total_steps = total_steps
        return self.part(total_steps)

    def must_stop(self) -> bool:
        if self.heart.lost:  # nor may we save: the folder may be another's by now
            raise UpdateFinishedTrialError
        return False

    def catch_up(self) -> None:
        """Reports what a run that goes on has measured before."""
        for line in self.folder.read_metrics():
            if line["kind"] == "valid":
                self._report(line["step"], line["valid_loss"])

    def validated(self, step: int, loss: float) -> None:
        self._report(step, loss)
        if step < self.total_steps and self.trial.should_prune():
            raise optuna.TrialPruned

    def _report(self, step: int, loss: float) -> None:
        if step not in self.reported:
            self.trial.report(loss, step)
            self.reported.add(step)
