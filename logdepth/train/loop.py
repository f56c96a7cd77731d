"""The training loop of one run. Every step is a function of the weights before it, the seed and its number.

So nothing random is saved: a run that was killed goes on from its checkpoint and ends in the same bits.
"""

import contextlib
import math
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from logdepth.capture import Captured
from logdepth.data import Batches, Prepared, TokenStore, document_bounds
from logdepth.errors import UserError
from logdepth.evaluate import Evaluation, evaluate, nats_graphs, perplexity
from logdepth.models import LanguageModel, num_parameters
from logdepth.models.language_model import going_on_without
from logdepth.runs import RunConfig, RunFolder, arithmetic
from logdepth.runs.environment import environment
from logdepth.runs.folder import load_weights
from logdepth.runs.tensors import load_tensors, save_tensors
from logdepth.train.faster import make_faster
from logdepth.train.interrupt import Interrupted, StopRequest
from logdepth.train.optimizer import (
    build_optimizer,
    learning_rate,
    optimizer_tensors,
    restore_optimizer,
    set_learning_rate,
)
from logdepth.train.trackers import open_trackers
from logdepth.train.watch import Watch

VERSION = 1
CHECKPOINT_SHARE = 0.05
"""Of the time may go into checkpoints at validations: short epochs do without some of them."""
Reason = Literal["all steps done", "no better validation loss"]


@dataclass
class Standing:
    """How far a run is."""

    step: int = 0
    """Steps done."""
    validated: int = 0
    """The step of the last validation."""
    best_step: int | None = None
    best_loss: float = math.inf
    without_better: int = 0
    """Validations since the best."""
    seconds: float = 0.0
    """Spent in training, validation included, over all processes."""
    finished: Reason | None = None
    losses: list[float] = field(default_factory=list)
    """Of the steps since the last line of metrics."""
    norm: float = math.nan
    """Of the last gradient, before it was clipped."""


class DivergedError(UserError):
    """A loss that is not a number."""


class Trainer:
    """One run, from wherever its folder says that it stands."""

    def __init__(
        self, folder: RunFolder, config: RunConfig, prepared: Prepared, device: torch.device, watch: Watch | None = None
    ) -> None:
        self.folder, self.config, self.device, self.watch = folder, config, device, watch or Watch()
        train = config.train
        self.valid = prepared.stores["valid"]
        self.batches = batches_of(config, prepared.stores["train"])
        self.separator = prepared.stores["train"].info.separator if train.reset_at_documents else None
        self.valid.refuse_if_nothing_to_predict()
        self.total_steps = train.max_steps or train.epochs * self.batches.steps_per_epoch
        self.validate_every = train.evaluate_every or self.batches.steps_per_epoch
        torch.manual_seed(config.seed)
        self.model: LanguageModel = config.model.build(prepared.tokenizer.vocab_size).to(device)
        self.optimizer = build_optimizer(self.model, train)
        self.standing = Standing()
        if folder.checkpoint.is_file():
            self._restore()
        elif train.init_from is not None:
            weights = RunFolder(train.init_from).weights("best")
            load_weights(self.model, load_tensors(weights)[0], weights)
        self.captured: Captured | None = None
        """A step as a CUDA graph."""
        self.captured_validation: Captured | None = None
        self.remarks: list[str] = []
        """What whoever asked for speed should know."""
        self._make_faster()
        self.unsaved_best: dict[str, Tensor] | None = None
        """Weights that are the best, until they are saved with the checkpoint that calls them so."""
        self.unseen: list[tuple[int, Tensor, Tensor]] = []
        """Step, loss and norm of the gradient of steps not yet looked at: looking makes a GPU wait."""
        self.logged_at, self.timed_steps, self.note = time.monotonic(), 0, ""

    def _make_faster(self) -> None:
        """Fused kernels, compiled code and a captured step: what the config asks for and the run allows."""
        train = self.config.train
        accelerate = train.accelerate and self.device.type == "cuda"
        if train.accelerate and not accelerate:
            self.remarks.append(f"train.accelerate changes nothing on the {self.device.type}: it is for CUDA")
        if reason := make_faster(self.model, accelerate=accelerate, compiled=train.compile):
            self.remarks.append(going_on_without(reason))
        if accelerate and self.separator is None:
            self.captured = Captured(
                self._gradients_and_update,
                clone=True,  # losses are looked at many steps later
                changes=self.model.parameters(),
                say=self._remark,
            )
            self.captured_validation = nats_graphs(self.model, self._remark)
        elif accelerate:
            self.remarks.append("no CUDA graph of steps: documents that start anew have other lengths in each")

    def _remark(self, line: str) -> None:
        self.progress.remark(line)

    def run(self) -> Standing:
        """Trains to the end; raises Interrupted, with everything saved, when a signal asks to stop."""
        standing = self.standing
        if not standing.finished:
            self.folder.rewind_metrics(standing.step, standing.validated)
        self.watch.started(self.total_steps)
        if standing.finished:
            return standing
        self.trackers = open_trackers(self.config, self.folder.path, standing.step)
        self.saved_at, self.save_seconds = time.monotonic(), 0.0
        self.started = self.saved_at - standing.seconds
        with (
            contextlib.ExitStack() as stack,
            repeatable(self.device, self.config.train.deterministic),
            StopRequest() as self.stop,
            self.watch.progress(self.total_steps, standing.step) as self.progress,
        ):
            for captured in filter(None, (self.captured, self.captured_validation)):
                stack.callback(captured.forget)  # memory for whoever trains next in this process
            self._introduce()
            if self.config.train.init_from is not None and not self.folder.checkpoint.is_file():
                self._save()  # from here on the run that it started from is no longer needed
            for tracker in self.trackers:
                stack.callback(tracker.close)
            while not standing.finished:
                if self._validation_is_due():
                    self._validate()
                elif self._was_asked_to_stop():
                    raise self._interrupted()
                else:
                    self._step()
                    if time.monotonic() - self.saved_at > 60 * self.config.train.checkpoint_minutes:
                        self._save()
        return standing

    def _introduce(self) -> None:
        """What is about to happen, for whoever watches."""
        train, info = self.config.train, self.batches.store.info
        kind, device = type(self.model).__name__, environment(self.device)["device"]
        tokens = f"{train.batch_size} × {train.context} tokens"
        start = f"from step {self.standing.step:,} on" if self.standing.step else "from the start"
        self.progress.say(
            f"{self.folder.path}: {kind} of {num_parameters(self.model):,} parameters on {device}; "
            f"{info.corpus}, {info.tokens:,} tokens; {self.total_steps:,} steps of {tokens}, {start}"
        )
        if train.warmup_steps >= self.total_steps:
            self.progress.remark(
                f"the warm-up of {train.warmup_steps:,} steps is longer than the run: the learning rate never gets to "
                "its peak; lower train.warmup_steps"
            )
        for remark in self.remarks:
            self.progress.remark(remark)

    def _step(self) -> None:
        train, step = self.config.train, self.standing.step
        rate = learning_rate(train, step, self.total_steps)
        windows = self._windows(step)
        torch.manual_seed(_seed_of(self.config.seed, step))  # dropout too depends on the step alone
        if self.captured is None:
            loss, norm = self._gradients_and_update(windows, rate)
        else:
            loss, norm = self.captured(windows, torch.full((), rate, device=self.device))
        self.standing.step = step + 1
        self.timed_steps += 1
        self.unseen.append((step + 1, loss, norm))
        if (step + 1) % train.log_every == 0:
            self._log(rate)
        self.progress.update(step + 1, self.note)

    def _windows(self, step: int) -> Tensor:
        windows = torch.from_numpy(self.batches.at(step))
        return windows.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else windows

    def _gradients_and_update(self, windows: Tensor, rate: float | Tensor) -> tuple[Tensor, Tensor]:
        """All of a step that a GPU does; what it does depends on the windows' shape alone, so it can be captured."""
        self.optimizer.zero_grad(set_to_none=True)  # a capture that failed may have left gradients without numbers
        loss = self._gradients(windows)
        return loss, self._update(rate)

    def _gradients(self, windows: Tensor) -> Tensor:
        """Adds up the gradients of a step's micro-batches; returns its loss."""
        loss = torch.zeros((), device=self.device)
        for part in torch.split(windows, self.config.train.micro_batch or len(windows)):
            part_loss = self._loss(part) * (len(part) / len(windows))
            torch.autograd.backward(part_loss)
            loss += part_loss.detach()
        return loss

    def _update(self, rate: float | Tensor) -> Tensor:
        """Changes the weights; returns the norm of the gradient before it was clipped."""
        set_learning_rate(self.optimizer, rate)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.train.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _loss(self, windows: Tensor) -> Tensor:
        inputs, targets = windows[:, :-1], windows[:, 1:]
        with arithmetic(self.config.train.precision, self.device):
            if self.separator is None:
                return self.model.loss(inputs, targets)
            bounds = document_bounds(inputs.cpu().numpy(), self.separator)
            return self.model.loss(inputs.flatten(), targets.flatten(), cu_seqlens=bounds)

    def _log(self, rate: float) -> None:
        """One line of metrics for the steps since the last."""
        self._look()
        standing, train = self.standing, self.config.train
        loss = sum(standing.losses) / len(standing.losses)
        now = time.monotonic()
        speed = self.timed_steps * train.batch_size * train.context / (now - self.logged_at)
        self.logged_at, self.timed_steps, standing.losses = now, 0, []
        self._record(
            "train", {"loss": loss, "learning_rate": rate, "gradient_norm": standing.norm, "tokens_per_second": speed}
        )
        epoch = standing.step / self.batches.steps_per_epoch
        self.note = f"loss {loss:.3f}, perplexity {perplexity(loss):.1f}, {speed:,.0f} tokens/s, epoch {epoch:.2f}"

    def _look(self) -> None:
        """Brings the losses and the last gradient norm of recent steps to the host; all must be finite."""
        steps, self.unseen = self.unseen, []
        if not steps:
            return
        losses = torch.stack([loss for _, loss, _ in steps]).tolist()
        norms = torch.stack([norm for _, _, norm in steps]).tolist()
        for (step, _, _), loss, norm in zip(steps, losses, norms, strict=True):
            if not (math.isfinite(loss) and math.isfinite(norm)):
                raise self._diverged(f"at step {step} the loss was {loss} and the gradient's norm {norm}")
        self.standing.losses += losses
        self.standing.norm = norms[-1]

    def _diverged(self, how: str) -> "DivergedError":
        return DivergedError(
            f"{how}: training diverged; the last good checkpoint in {self.folder.path}, if there was one, is kept; "
            "start anew with a lower --train.learning-rate"
        )

    def _validation_is_due(self) -> bool:
        step = self.standing.step
        at_mark = step % self.validate_every == 0 or step == self.total_steps
        return at_mark and step > self.standing.validated

    def _validate(self) -> None:
        standing, train = self.standing, self.config.train
        if self.unseen or standing.losses:
            self._log(learning_rate(train, standing.step - 1, self.total_steps))
        result = evaluate(
            self.model,
            self.valid,
            context=train.context,
            precision=train.precision,
            reset_at_documents=train.reset_at_documents,
            graphs=self.captured_validation,
            on_progress=self._give_way,
        )
        if not math.isfinite(result.loss):
            raise self._diverged(f"after step {standing.step} the validation loss was {result.loss}")
        standing.validated = standing.step
        better = result.loss < standing.best_loss
        if better:
            standing.best_step, standing.best_loss, standing.without_better = standing.step, result.loss, 0
        else:
            standing.without_better += 1
        if standing.step == self.total_steps:
            standing.finished = "all steps done"
        elif standing.without_better >= train.patience:
            standing.finished = "no better validation loss"
        self._report(result, better)
        if better:
            self.unsaved_best = {name: one.to("cpu", copy=True) for name, one in self.model.state_dict().items()}
        since = time.monotonic() - self.saved_at
        if standing.finished or CHECKPOINT_SHARE * since >= self.save_seconds:
            self._save()
        self.watch.validated(standing.step, result.loss, over=standing.finished is not None)
        self.logged_at, self.timed_steps = time.monotonic(), 0

    def _give_way(self, _tokens: int) -> None:
        """A stop request does not wait for the end of a validation: it will be made again."""
        if self._was_asked_to_stop():
            raise self._interrupted()

    def _was_asked_to_stop(self) -> bool:
        return self.stop.signal_number is not None or self.watch.must_stop()

    def _interrupted(self) -> Interrupted:
        self._save()
        return Interrupted(self.standing.step, self.stop.signal_number)

    def _report(self, result: Evaluation, better: bool) -> None:
        values = {
            "valid_loss": result.loss,
            "valid_perplexity": result.token_perplexity,
            "valid_word_perplexity": result.word_perplexity,
            "valid_bits_per_byte": result.bits_per_byte,
        }
        self._record("valid", values)
        epoch = self.standing.step / self.batches.steps_per_epoch
        self.progress.say(
            f"step {self.standing.step:,} (epoch {epoch:.2f}): validation perplexity {result.token_perplexity:.2f}, "
            f"{result.bits_per_byte:.4f} bits per byte" + (", the best so far" if better else "")
        )

    def _record(self, kind: str, values: dict[str, float]) -> None:
        self.standing.seconds = time.monotonic() - self.started
        facts: dict[str, Any] = {"kind": kind, "step": self.standing.step, "seconds": round(self.standing.seconds, 3)}
        self.folder.append_metrics([facts | values])
        for tracker in self.trackers:
            tracker.log(self.standing.step, values)

    def _save(self) -> None:
        """A checkpoint, unless the steps since the last were not good."""
        self._look()
        begun = time.monotonic()
        self.standing.seconds = begun - self.started
        weights = self.model.state_dict()
        tensors = {f"model/{name}": tensor for name, tensor in weights.items()}
        moments = optimizer_tensors(self.model, self.optimizer)
        tensors |= {f"optimizer/{name}": tensor for name, tensor in moments.items()}
        self.folder.save_weights("last", weights, self.standing.step)
        if self.unsaved_best is not None:
            assert self.standing.best_step is not None
            self.folder.save_weights("best", self.unsaved_best, self.standing.best_step)
            self.unsaved_best = None
        # Last, for it says what is done: a kill before it makes the rest again.
        save_tensors(self.folder.checkpoint, tensors, {"version": VERSION, "standing": asdict(self.standing)})
        self.saved_at = time.monotonic()
        self.save_seconds = self.saved_at - begun

    def _restore(self) -> None:
        tensors, record = load_tensors(self.folder.checkpoint)
        if not isinstance(record, dict) or record.get("version") != VERSION:
            raise UserError(f"{self.folder.checkpoint} is not a checkpoint of this version of logdepth")
        load_weights(self.model, _below("model/", tensors), self.folder.checkpoint)
        restore_optimizer(self.model, self.optimizer, _below("optimizer/", tensors))
        self.standing = Standing(**record["standing"])


def batches_of(config: RunConfig, store: TokenStore) -> Batches:
    """What a run trains on, step by step."""
    train = config.train
    return Batches(
        store, batch_size=train.batch_size, context=train.context, seed=config.seed, shifted=train.shift_windows
    )


def _below(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}


def _seed_of(seed: int, step: int) -> int:
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0]) >> 1


@contextlib.contextmanager
def repeatable(device: torch.device, deterministic: bool) -> Iterator[None]:
    """On CUDA, only algorithms that give the same bits each time; the CPU's always do."""
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
