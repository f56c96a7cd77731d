"""Checkpoints: how far a run is, and everything needed to resume it bit-for-bit."""

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from logdepth.checksums import checksum_of_bytes
from logdepth.config import from_dict
from logdepth.errors import UserError
from logdepth.models import LanguageModel
from logdepth.parallel import Shared, part_like
from logdepth.runs import RunFolder
from logdepth.runs.folder import WEIGHTS_REMEDY, load_weights
from logdepth.training.optimizer import ModelOptimizer

VERSION = 1
CHECKPOINT_SHARE = 0.05
"""The largest share of the time that checkpoints at validations may take: with short epochs, some are left out."""
Reason = Literal["all steps done", "no better validation loss"]


@dataclass
class TrainState:
    """How far a run is. Checkpoints hold these fields by their names."""

    step: int = 0
    """Number of completed steps."""
    validated: int = 0
    """Step of the last validation."""
    best_step: int | None = None
    """Step of the validation with the lowest loss."""
    best_loss: float = math.inf
    """Lowest validation loss, in nats per token."""
    without_better: int = 0
    """Number of validations since the best one."""
    seconds: float = 0.0
    """Time spent in training, with validations, over all processes that have worked on the run."""
    finished: Reason | None = None
    """Why the run ended; None while it is not finished."""
    losses: list[float] = field(default_factory=list)
    """Losses of the steps since the last line of metrics."""
    norm: float = math.nan
    """Norm of the last gradient, before clipping."""

    def __post_init__(self) -> None:
        if not 0 <= self.validated <= self.step:
            raise ValueError(f"validated must be from 0 to step; got {self.validated} and {self.step}")


class Checkpoints:
    """Saves and restores the state of one run, and decides when saving is worth its time.

    Files hold whole tensors, whatever the number of ranks: the first one collects, writes and reads them.
    """

    def __init__(self, folder: RunFolder, model: LanguageModel, optimizer: ModelOptimizer, shared: Shared) -> None:
        self.folder, self.model, self.optimizer, self.shared = folder, model, optimizer, shared
        self.metrics_mark: dict[str, Any] | None = {"bytes": 0, "sha256": checksum_of_bytes(b"")}
        """Where the metrics were at the last checkpoint; None if an older version wrote it."""
        self.named: dict[str, str] = {}
        """Checksums of the saved best and last weights, as far as they are known: older versions wrote none."""
        self.unsaved_best: dict[str, Tensor] | None = None
        """The best weights, until they are saved together with the checkpoint that names their step."""
        self.saved_at, self.save_seconds = time.monotonic(), 0.0

    def keep_best(self) -> None:
        """Keeps a copy of the present weights, to be saved as the best ones with the next checkpoint."""
        weights = self.shared.on_first(self.model.state_dict())
        if self.shared.ranks.is_first:
            self.unsaved_best = {name: one.to("cpu", copy=True) for name, one in weights.items()}

    def save(self, state: TrainState) -> None:
        started = time.monotonic()
        weights, moments = (self.shared.on_first(one) for one in (self.model.state_dict(), self.optimizer.tensors()))
        if not self.shared.ranks.is_first:
            return
        tensors = {f"model/{name}": tensor for name, tensor in weights.items()}
        tensors |= {f"optimizer/{name}": tensor for name, tensor in moments.items()}
        self.named["last"] = self.folder.save_weights("last", weights, state.step)
        if self.unsaved_best is not None:
            assert state.best_step is not None
            self.named["best"] = self.folder.save_weights("best", self.unsaved_best, state.best_step)
            self.unsaved_best = None
        # The checkpoint comes last, for it says what is saved: after a kill before it, the steps are repeated.
        self.metrics_mark = self.folder.metrics_mark()
        facts = {"version": VERSION, "standing": asdict(state)}
        record = facts | {"metrics": self.metrics_mark, "weights": self.named}
        self.folder.save_tensors(self.folder.checkpoint, tensors, record)
        self.saved_at = time.monotonic()
        self.save_seconds = self.saved_at - started

    def restore(self) -> TrainState:
        """Loads the checkpoint into the model and the optimizer; returns how far the run is."""
        file = self.folder.checkpoint
        tensors, record = self.shared.ranks.from_first(lambda: self.folder.read_tensors(file))
        try:
            if record.get("version") != VERSION:
                raise UserError(f"its version is {record.get('version')!r}")
            state = from_dict(TrainState, record.get("standing"), "standing")
        except UserError as error:
            what = f"{file} is not a checkpoint of this version of logdepth"
            raise UserError(f"{what} ({error}); {WEIGHTS_REMEDY}") from None
        self.load(_below("model/", tensors), file)
        self.optimizer.restore(_below("optimizer/", tensors))
        self.metrics_mark = record.get("metrics")
        self.named = dict(record.get("weights", {}))
        return state

    def load(self, weights: dict[str, Tensor], file: Path) -> None:
        """Loads whole weights into the model, of which this rank may have parts."""
        mine = self.model.state_dict()
        load_weights(
            self.model,
            {name: part_like(one, mine[name]) if name in mine else one for name, one in weights.items()},
            file,
        )

    def verify_weights(self, state: TrainState) -> None:
        """Verifies that the weights which resuming does not write again are those that the checkpoint names."""
        if state.best_step is not None:
            self.folder.verify_named("best")
        if state.finished:
            self.folder.verify_named("last")

    def rewind_metrics(self, state: TrainState) -> None:
        """Removes the metrics after the last checkpoint, because their steps follow again."""
        if self.metrics_mark is None:
            self.folder.rewind_metrics_to_steps(state.step, state.validated)
        else:
            self.folder.rewind_metrics(self.metrics_mark, finished=state.finished is not None)

    def is_due(self, minutes: float) -> bool:
        """Whether the last checkpoint is older than this."""
        return time.monotonic() - self.saved_at > 60 * minutes

    def is_affordable(self) -> bool:
        """Whether saving, which takes as long as the last time, would keep to its share of the time."""
        return CHECKPOINT_SHARE * (time.monotonic() - self.saved_at) >= self.save_seconds


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
