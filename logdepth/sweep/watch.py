"""Hooks of a sweep into the training of one trial: they report validation losses and prune the trial."""

from collections.abc import Callable

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import Trial

from logdepth.progress import Part
from logdepth.runs import RunFolder
from logdepth.sweep.heartbeat import Heartbeat
from logdepth.training import Watch


class TrialPart(Part):
    """A trial's part of the sweep's progress. It prints no training messages except remarks."""

    def say(self, line: str) -> None:
        pass


NUM_REPORT_POINTS = 20
"""Number of equally spaced points of a schedule at which losses are reported.

Trials are compared at the same fraction of their schedules. At the same step, a trial whose learning rate decays
sooner would always look better."""


class TrialWatch(Watch):
    """Reports validation losses to the study, prunes the trial, and stops it if another worker has taken it over."""

    def __init__(self, trial: Trial, heart: Heartbeat, folder: RunFolder, part: Callable[[int], Part]) -> None:
        self.trial, self.heart, self.folder, self.part = trial, heart, folder, part
        self.total_steps = 0
        self.last: tuple[int, float] | None = None
        """Step and loss of the latest validation."""

    def started(self, total_steps: int) -> None:
        """Report the validation losses that a resumed run measured before."""
        self.total_steps = total_steps
        for line in self.folder.read_metrics():
            if line["kind"] == "valid":
                self._report(line["step"], line["valid_loss"])

    def progress(self, total_steps: int, _done: int) -> Part:
        return self.part(total_steps)

    def must_stop(self) -> bool:
        if self.heart.lost:  # do not save: another worker may be using the folder
            raise UpdateFinishedTrialError
        return False

    def validated(self, step: int, loss: float, *, over: bool) -> None:
        if self._report(step, loss) and not over and self.trial.should_prune():
            raise optuna.TrialPruned

    def _report(self, step: int, loss: float) -> bool:
        """Report the points passed since the latest validation, with interpolated losses; return whether any was."""
        step_before, loss_before = self.last or (0, loss)
        first, last = (NUM_REPORT_POINTS * one // self.total_steps for one in (step_before, step))
        for point in range(first + 1, last + 1):
            share = (point * self.total_steps / NUM_REPORT_POINTS - step_before) / (step - step_before)
            self.trial.report(loss_before + share * (loss - loss_before), point)
        self.last = step, loss
        return last > first
