"""The training loop of one run, and its metrics.

Each step is a function of the weights before it, the seed and the number of the step. No state of a random generator is
saved: a run that was killed resumes from its checkpoint bit-for-bit.
"""

import contextlib
import math
import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from logdepth.acceleration import acceleration_in_words, compile_model, kernels_as_asked
from logdepth.capture import Captured
from logdepth.data import Batches, Prepared, TokenStore
from logdepth.errors import UserError
from logdepth.evaluate import Evaluation, perplexity
from logdepth.models import LanguageModel, num_parameters, unallocated
from logdepth.parallel import ALONE, Ranks, Shared
from logdepth.runs import RunConfig, RunFolder
from logdepth.runs.environment import environment
from logdepth.training.checkpoint import Checkpoints, TrainState
from logdepth.training.interrupt import Interrupted, StopRequest
from logdepth.training.next_token_loss import NextTokenLoss
from logdepth.training.optimizer import ModelOptimizer, learning_rate
from logdepth.training.step import TrainingStep
from logdepth.training.trackers import Tracker, open_trackers
from logdepth.training.validation import Validation
from logdepth.training.watch import Watch


class DivergedError(UserError):
    """A loss or a gradient that is not finite."""


class Trainer:
    """Trains one run, from the checkpoint in its folder if there is one. Every rank has a trainer; the first writes."""

    def __init__(
        self,
        folder: RunFolder,
        config: RunConfig,
        prepared: Prepared,
        device: torch.device,
        watch: Watch | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        self.folder, self.config, self.device, self.watch = folder, config, device, watch or Watch()
        self.ranks = ranks
        train, store = config.train, prepared.stores["train"]
        self.batches = batches_of(config, store, rank=ranks.rank, world_size=ranks.world_size)
        prepared.stores["valid"].refuse_if_nothing_to_predict()
        prepared.stores["valid"].verify()  # now, and not at the first validation
        self.total_steps = train.max_steps or train.epochs * self.batches.steps_per_epoch
        torch.manual_seed(config.seed)
        self.is_saved = ranks.from_first(folder.checkpoint.is_file)
        """Whether there is a checkpoint."""
        begun = self.is_saved or train.init_from is not None
        with unallocated() if begun else contextlib.nullcontext():  # weights that are read need no initial values
            self.model: LanguageModel = config.model.build(prepared.tokenizer.vocab_size)
        self.model.allocate(device)
        self.loss = NextTokenLoss(self.model)
        self.kind = type(self.model).__name__
        self.shared = Shared(self.model, self.loss, ranks, train.parallel)
        self.optimizer = ModelOptimizer(self.model, train)
        self.checkpoints = Checkpoints(folder, self.model, self.optimizer, self.shared)
        self.state = TrainState()
        if self.is_saved:
            self.state = self.checkpoints.restore()
        elif train.init_from is not None:
            first = RunFolder(train.init_from)
            self.checkpoints.load(ranks.from_first(lambda: first.read_weights("best")[0]), first.weights("best"))
        separator = store.info.separator if train.reset_at_documents else None
        self.training_step = TrainingStep(self.shared, self.optimizer, train, separator)
        self.validation = Validation(
            self.model,
            prepared.stores["valid"],
            train,
            every=train.evaluate_every or self.batches.steps_per_epoch,
            total_steps=self.total_steps,
            ranks=ranks,
        )
        if self.state.step > self.total_steps:
            raise UserError(
                f"{folder.path} has already trained {self.state.step:,} steps; set --train.max-steps to at least that"
            )
        self.state.finished = self.validation.reason_to_end(self.state)
        if ranks.is_first:
            self.checkpoints.verify_weights(self.state)
        self.captured: Captured | None = None
        """The training step as a CUDA graph."""
        self.warnings: list[str] = []
        """Lines to print when training starts."""
        self._make_faster()
        self.pending: list[tuple[int, Tensor, Tensor]] = []
        """Step, loss and gradient norm of the steps whose numbers are still on the device: reading makes a GPU wait."""
        self.logged_at, self.timed_steps, self.note = time.monotonic(), 0, ""

    def _make_faster(self) -> None:
        """Turns on the fused kernels, compiled code and CUDA graphs that the config asks for and the run allows."""
        train = self.config.train
        accelerate = train.accelerate and self.device.type == "cuda"
        if train.compile:
            compile_model(self.model)
        if accelerate and self.ranks.world_size > 1:
            self.warnings.append("no CUDA graphs: they do not hold the messages between ranks")
        elif accelerate and self.training_step.separator is None:
            self.captured = Captured(
                self.training_step,
                clone=True,  # losses are read many steps later
                changes=self.model.parameters(),
                on_warning=self._warn,
            )
            self.validation.capture(self._warn)
        elif accelerate:
            self.warnings.append("no CUDA graph of training steps: with reset_at_documents their shapes differ")

    def _warn(self, line: str) -> None:
        self.progress.remark(line)

    def run(self) -> TrainState:
        """Trains to the end. When a signal asks to stop, it saves everything and raises Interrupted."""
        state = self.state
        self.watch.started(self.total_steps)
        if state.finished:
            return state
        self.trackers: list[Tracker] = []
        if self.ranks.is_first:
            _ = self.folder.belonging  # what the checkpoints will name
            self.trackers = open_trackers(self.config, self.folder.path, state.step)
        self.started = time.monotonic() - state.seconds
        with (
            contextlib.ExitStack() as stack,
            repeatable(self.device, self.config.train.deterministic),
            kernels_as_asked(self.config.train.accelerate),
            StopRequest(repeated=self.ranks.world_size > 1) as self.stop,
            self.watch.progress(self.total_steps, state.step) as self.progress,
        ):
            for captured in filter(None, (self.captured, self.validation.captured)):
                stack.callback(captured.forget)  # frees memory for the next run in this process
            self._introduce()
            if self.config.train.init_from is not None and not self.is_saved:
                self._save()  # from here on the run that gave its weights is no longer needed
            for tracker in self.trackers:
                stack.callback(tracker.close)
            while not state.finished:
                if self.validation.is_due(state):
                    self._validate()
                elif self._must_stop():
                    raise self._interrupted()
                else:
                    self._step()
                    if self.save_is_due:
                        self._save()
        return state

    def _introduce(self) -> None:
        """Prints what is about to be trained."""
        train, info = self.config.train, self.batches.store.info
        device = environment(self.device)["device"]
        tokens = f"{train.batch_size} × {train.context} tokens"
        if self.ranks.world_size > 1:
            tokens += f" on {self.ranks.world_size} ranks ({self.shared.in_words()})"
        start = f"from step {self.state.step:,} on" if self.state.step else "from the start"
        self.progress.say(
            f"{self.folder.path}: {self.kind} of {num_parameters(self.model):,} parameters on {device}; "
            f"{info.corpus}, {info.tokens:,} tokens; {self.total_steps:,} steps of {tokens}, {start}"
        )
        if self.device.type == "cuda":
            self.progress.say(acceleration_in_words(self.model, train.accelerate))
        if train.warmup_steps >= self.total_steps:
            self.warnings.append(
                f"the warm-up of {train.warmup_steps:,} steps is longer than the run: the learning rate never reaches "
                "its peak; lower --train.warmup-steps"
            )
        for line in self.warnings:
            self.progress.remark(line)

    def _step(self) -> None:
        train, step = self.config.train, self.state.step
        rate = learning_rate(train, step, self.total_steps)
        windows = self._windows(step)
        # Dropout too depends only on the seed, the step, and where the micro-batch starts in the batch.
        seed_of_row = partial(seed_of_step, self.config.seed, step)
        torch.manual_seed(seed_of_row(self.batches.first))
        if self.ranks.world_size > 1 or train.parallel:
            self.training_step.seed_of_row = lambda row: seed_of_row(self.batches.first + row)
        if self.captured is None:
            loss, norm = self.training_step(windows, rate)
        else:
            loss, norm = self.captured(windows, torch.full((), rate, device=self.device))
        self.state.step = step + 1
        self.timed_steps += 1
        self.pending.append((step + 1, loss, norm))
        if (step + 1) % train.log_every == 0:
            self._log(rate)
        self.progress.update(step + 1, self.note)

    def _windows(self, step: int) -> Tensor:
        windows = torch.from_numpy(self.batches.at(step))
        return windows.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else windows

    def _validate(self) -> None:
        state = self.state
        if self.pending or state.losses:
            self._log(learning_rate(self.config.train, state.step - 1, self.total_steps))
        with self.shared.whole_weights():
            result = self.validation.measure(self._stop_if_asked)
        if not math.isfinite(result.loss):
            raise self._diverged(f"after step {state.step} the validation loss was {result.loss}")
        is_best = self.validation.record(state, result.loss)
        self._report(result, is_best)
        if is_best:
            self.checkpoints.keep_best()
        if state.finished or self._first_says(self.checkpoints.is_affordable()):
            self._save()
        self.watch.validated(state.step, result.loss, over=state.finished is not None)
        self.logged_at, self.timed_steps = time.monotonic(), 0

    def _stop_if_asked(self, _tokens: int) -> None:
        """Ends a validation when training must stop: it is repeated after resuming."""
        if self._must_stop():
            raise self._interrupted()

    def _must_stop(self) -> bool:
        """Whether any rank must stop. All ranks ask at the same places, and also learn whether a checkpoint is due."""
        due = self.ranks.is_first and self.checkpoints.is_due(self.config.train.checkpoint_minutes)
        signal_number, must_stop, save_is_due = self.ranks.highest(
            self.stop.signal_number or 0, int(self.watch.must_stop()), int(due)
        )
        self.signal_number = signal_number or None
        self.save_is_due = bool(save_is_due)
        return bool(signal_number or must_stop)

    def _first_says(self, answer: bool) -> bool:
        """The answer of the first rank to a question that depends on its clock."""
        return bool(self.ranks.highest(int(answer and self.ranks.is_first))[0])

    def _interrupted(self) -> Interrupted:
        self._save()
        self.ranks.wait()  # a rank that ended while the first one writes would end that one too
        return Interrupted(self.state.step, self.signal_number)

    def _save(self) -> None:
        """Writes a checkpoint; raises DivergedError instead if a step since the last one was not finite."""
        self._read_pending()
        self.state.seconds = time.monotonic() - self.started
        self.checkpoints.save(self.state)

    def _read_pending(self) -> None:
        """Brings the losses and the last gradient norm of recent steps to the host; all must be finite."""
        steps, self.pending = self.pending, []
        if not steps:
            return
        losses = self.ranks.mean(torch.stack([loss for _, loss, _ in steps])).tolist()
        norms = torch.stack([norm for _, _, norm in steps]).tolist()
        for (step, _, _), loss, norm in zip(steps, losses, norms, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise self._diverged(f"at step {step} the loss was {loss} and the norm of the gradient {norm}")
        self.state.losses += losses
        self.state.norm = norms[-1]

    def _diverged(self, how: str) -> DivergedError:
        return DivergedError(
            f"{how}: training diverged; the last good checkpoint in {self.folder.path}, if there was one, is kept; "
            "start a new run with a lower --train.learning-rate"
        )

    def _log(self, rate: float) -> None:
        """Writes one line of metrics for the steps since the last line."""
        self._read_pending()
        state, train = self.state, self.config.train
        loss = sum(state.losses) / len(state.losses)
        now = time.monotonic()
        speed = self.timed_steps * train.batch_size * train.context / (now - self.logged_at)
        self.logged_at, self.timed_steps, state.losses = now, 0, []
        self._record(
            "train", {"loss": loss, "learning_rate": rate, "gradient_norm": state.norm, "tokens_per_second": speed}
        )
        epoch = state.step / self.batches.steps_per_epoch
        self.note = f"loss {loss:.3f}, perplexity {perplexity(loss):.1f}, {speed:,.0f} tokens/s, epoch {epoch:.2f}"

    def _report(self, result: Evaluation, is_best: bool) -> None:
        """Writes a line of metrics for a validation, and prints it."""
        values = {
            "valid_loss": result.loss,
            "valid_perplexity": result.token_perplexity,
            "valid_word_perplexity": result.word_perplexity,
            "valid_bits_per_byte": result.bits_per_byte,
        }
        self._record("valid", values)
        epoch = self.state.step / self.batches.steps_per_epoch
        self.progress.say(
            f"step {self.state.step:,} (epoch {epoch:.2f}): validation perplexity {result.token_perplexity:.2f}, "
            f"{result.bits_per_byte:.4f} bits per byte" + (", the best so far" if is_best else "")
        )

    def _record(self, kind: str, values: dict[str, float]) -> None:
        self.state.seconds = time.monotonic() - self.started
        line: dict[str, Any] = {"kind": kind, "step": self.state.step, "seconds": round(self.state.seconds, 3)}
        if self.ranks.is_first:
            self.folder.append_metrics([line | values])
        for tracker in self.trackers:
            tracker.log(self.state.step, values)


def batches_of(config: RunConfig, store: TokenStore, *, rank: int = 0, world_size: int = 1) -> Batches:
    """The batches that a run trains on, as one of `world_size` ranks sees them."""
    train = config.train
    return Batches(
        store,
        batch_size=train.batch_size,
        context=train.context,
        seed=config.seed,
        shifted=train.shift_windows,
        rank=rank,
        world_size=world_size,
    )


def seed_of_step(seed: int, step: int, row: int = 0) -> int:
    """The seed of torch's generator in a step, for dropout in a micro-batch that starts at a row of the batch."""
    place = [seed, step, row] if row else [seed, step]
    return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0]) >> 1


@contextlib.contextmanager
def repeatable(device: torch.device, deterministic: bool) -> Iterator[None]:
    """Restricts CUDA to deterministic algorithms, if asked to; those of the CPU always are."""
    if device.type != "cuda" or not deterministic:
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    before = torch.are_deterministic_algorithms_enabled()
    memory: Any = torch.utils.deterministic
    fill, memory.fill_uninitialized_memory = memory.fill_uninitialized_memory, False
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = fill
