"""Validation during training: when it is due, what it measures, and when it stops the run early."""

from collections.abc import Callable

from logdepth.capture import Captured
from logdepth.data import TokenStore
from logdepth.evaluate import Evaluation, evaluate, loss_graphs
from logdepth.models import LanguageModel
from logdepth.parallel import ALONE, Ranks
from logdepth.runs import TrainConfig
from logdepth.training.checkpoint import Reason, TrainState


class Validation:
    """The loss on the validation split, every so many steps and after the last."""

    def __init__(
        self,
        model: LanguageModel,
        store: TokenStore,
        config: TrainConfig,
        *,
        every: int,
        total_steps: int,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model, self.store, self.config, self.ranks = model, store, config, ranks
        self.every, self.total_steps = every, total_steps
        self.captured: Captured | None = None

    def capture(self, on_warning: Callable[[str], None]) -> Captured:
        """Uses CUDA graphs from now on; `on_warning` gets the line that says why there is none."""
        self.captured = loss_graphs(self.model, on_warning)
        return self.captured

    def is_due(self, state: TrainState) -> bool:
        at_mark = state.step % self.every == 0 or state.step == self.total_steps
        return at_mark and state.step > state.validated

    def measure(self, on_progress: Callable[[int], None]) -> Evaluation:
        """Evaluates the weights as they are; what `on_progress` raises ends the evaluation."""
        return evaluate(
            self.model,
            self.store,
            context=self.config.context,
            precision=self.config.precision,
            reset_at_documents=self.config.reset_at_documents,
            accelerate=self.config.accelerate,
            graphs=self.captured,
            ranks=self.ranks,
            on_progress=on_progress,
        )

    def record(self, state: TrainState, loss: float) -> bool:
        """Adds a validation to the state, and whether the run is finished; True for the lowest loss so far."""
        state.validated = state.step
        is_best = loss < state.best_loss
        if is_best:
            state.best_step, state.best_loss, state.without_better = state.step, loss, 0
        else:
            state.without_better += 1
        state.finished = self.reason_to_end(state)
        return is_best

    def reason_to_end(self, state: TrainState) -> Reason | None:
        """Why a run in this state is finished; None if it is not. A run that is extended is no longer finished."""
        if state.validated < state.step:
            return None
        if state.step == self.total_steps:
            return "all steps done"
        return "no better validation loss" if state.without_better >= self.config.patience else None
