"""What a sweep wants of a trial's training: losses as they come, an end where one is due. It knows one trial only."""

from collections.abc import Callable

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import Trial

from logdepth.progress import Part, Progress
from logdepth.runs import RunFolder
from logdepth.sweep.heartbeat import Heartbeat
from logdepth.training import Watch


class QuietPart(Part):
    """A trial's share of the sweep; what training says of itself is in its metrics, remarks come once in all trials."""

    def __init__(self, whole: Progress, label: str, total: float, share: float, remarks: set[str]) -> None:
        super().__init__(whole, label, total, share)
        self.remarks = remarks

    def say(self, line: str) -> None:
        pass

    def remark(self, line: str) -> None:
        if line not in self.remarks:
            self.remarks.add(line)
            super().say(line)


PLACES = 20
"""Parts of a schedule at whose ends losses are reported. Trials are compared at the same place of their schedules: at
the same step, one whose learning rate falls sooner would always look better."""


class TrialWatch(Watch):
    """Reports validation losses to the study, which may prune; stops where the trial is no longer ours."""

    def __init__(self, trial: Trial, heart: Heartbeat, folder: RunFolder, part: Callable[[int], Part]) -> None:
        self.trial, self.heart, self.folder, self.part = trial, heart, folder, part
        self.total_steps = 0
        self.last: tuple[int, float] | None = None
        """Step and loss of the last validation."""

    def started(self, total_steps: int) -> None:
        """Reports what a run that goes on has measured before."""
        self.total_steps = total_steps
        for line in self.folder.read_metrics():
            if line["kind"] == "valid":
                self._report(line["step"], line["valid_loss"])

    def progress(self, total_steps: int, _done: int) -> Part:
        return self.part(total_steps)

    def must_stop(self) -> bool:
        if self.heart.lost:  # nor may we save: the folder may be another's by now
            raise UpdateFinishedTrialError
        return False

    def validated(self, step: int, loss: float, *, over: bool) -> None:
        if self._report(step, loss) and not over and self.trial.should_prune():
            raise optuna.TrialPruned

    def _report(self, step: int, loss: float) -> bool:
        """Reports the places since the last validation, between whose loss and this one they lie; whether any did."""
        step_before, loss_before = self.last or (0, loss)
        first, last = (PLACES * one // self.total_steps for one in (step_before, step))
        for place in range(first + 1, last + 1):
            share = (place * self.total_steps / PLACES - step_before) / (step - step_before)
            self.trial.report(loss_before + share * (loss - loss_before), place)
        self.last = step, loss
        return last > first
