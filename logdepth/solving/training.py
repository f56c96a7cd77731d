"""Training of a solver on a task. It resumes bit-for-bit: a step depends on the weights before it, seed and number.

The folder of a run has its config and one checkpoint, which is also where the trained weights are.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logdepth.acceleration import kernels_as_asked
from logdepth.atomic import write_json
from logdepth.blocks import Block
from logdepth.capture import Captured
from logdepth.checksums import checksum_of, seal
from logdepth.config import from_dict, to_dict
from logdepth.errors import UserError
from logdepth.models import unallocated
from logdepth.ops.cross_entropy import IGNORED
from logdepth.ops.precision import arithmetic
from logdepth.runs import device_named
from logdepth.runs.tensors import load_tensors, save_tensors
from logdepth.solving.accuracy import CHECK_SEQUENCES, CHECKS, beyond, measure_case
from logdepth.solving.config import TaskRunConfig, TaskTrainConfig, refuse_change
from logdepth.solving.result import read_sealed
from logdepth.solving.solver import Questions, Solver, build_solver
from logdepth.tasks import Case, Examples, Task, task_named
from logdepth.training import ModelOptimizer, repeatable, seed_of_step

FLOOR = 1e-3
"""The learning rate at the end of a cosine, as a share of its peak."""
WINDOW = 20
"""Number of steps over which the accuracy of the curriculum is taken, and after which losses are read."""
CHECKED_LENGTH = 1024
"""Longest test case that checks during training cover, unless training itself is nearly as long."""
CHECKED_CASES = 6
"""How many test cases checks during training cover, at most."""
DIVERGED = "diverged"
"""Why a training ended whose loss was not finite."""
CHECKPOINT = "checkpoint.safetensors"
REMEDY = "remove this folder to train the run again"


@dataclass
class SolverState:
    """How far a training is. Checkpoints hold these fields by their names."""

    step: int = 0
    """Number of completed steps."""
    num_cases: int = 0
    """Number of training cases that the curriculum has reached; 0 before the first step."""
    solved_checks: int = 0
    """Number of checks in a row at which the task was solved."""
    finished: str | None = None
    """Why training ended; None while it goes on."""
    seconds: float = 0.0
    """Time spent in training."""
    curve: list[list[float]] = field(default_factory=list)
    """Per check: step, training loss and accuracy since the last check, number of cases, lowest accuracy checked."""
    pending: list[list[float]] = field(default_factory=list)
    """Loss and accuracy of the steps since the last check."""
    recent: list[float] = field(default_factory=list)
    """Accuracy of the steps since the curriculum last looked."""


def examples_at(task: Task, config: TaskTrainConfig, seed: int, step: int, num_cases: int) -> Examples:
    """The examples of a training step, of one case drawn from the first `num_cases`."""
    rng = np.random.default_rng([seed, 0, step])
    case = task.train_cases[int(rng.integers(num_cases))]
    batch = config.batch_size if config.batch_tokens is None else max(1, config.batch_tokens // case.length)
    return task.sample(rng, batch, case)


def learning_rate(config: TaskTrainConfig, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    place = (step - config.warmup_steps) / max(1, config.steps - 1 - config.warmup_steps)
    return config.learning_rate * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, place))))


def checked_cases(task: Task) -> list[Case]:
    """The test cases that checks during training cover: a few beyond training at even distances, and not too long."""
    longest = max(CHECKED_LENGTH, 4 * max(case.length for case in task.train_cases))
    cases = [case for case in beyond(task, task.test_cases) if case.length <= longest]
    count = min(CHECKED_CASES, len(cases))
    return [cases[number * (len(cases) - 1) // max(1, count - 1)] for number in range(count)]


class SolverStep:
    """One optimizer step. Its GPU work depends only on the shapes of the questions, so a CUDA graph can capture it."""

    def __init__(self, model: Solver, optimizer: ModelOptimizer, config: TaskTrainConfig) -> None:
        self.model, self.optimizer, self.config = model, optimizer, config
        self.parameters = list(model.parameters())

    def __call__(
        self, tokens: Tensor, targets: Tensor, rate: float | Tensor, places: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Trains on a batch; returns its mean loss and the share of right answers."""
        self.optimizer.zero_grad()
        with arithmetic(self.config.precision, tokens.device):
            logits = self.model(tokens, places)
        loss = F.cross_entropy(logits.float(), targets, ignore_index=IGNORED)
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        self.optimizer.step(rate)
        self.optimizer.zero_grad()
        right = (logits.detach().argmax(-1) == targets).sum() / (targets != IGNORED).sum()
        return loss.detach(), right

    def captured(self, tokens: Tensor, targets: Tensor, rate: Tensor, *places: Tensor) -> tuple[Tensor, Tensor]:
        """The same with tensors by position, as graphs need them."""
        return self(tokens, targets, rate, *places)


class SolverTrainer:
    """Trains one solver, from the checkpoint in its folder if there is one.

    Args:
        config: the run.
        folder: where its checkpoint is kept.
        on_step: called after each step with the number of completed steps.
        must_stop: asked after each step; if true, training is saved and returns unfinished.
        on_line: called with a line for the user.
    """

    def __init__(
        self,
        config: TaskRunConfig,
        folder: Path,
        *,
        on_step: Callable[[int], None] = lambda _: None,
        must_stop: Callable[[], bool] = lambda: False,
        on_line: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.config, self.folder, self.task = config, folder, task_named(config.task)
        self.on_step, self.must_stop, self.on_line = on_step, must_stop, on_line
        self.device = device_named(config.train.device)
        if config.train.threads is not None:
            torch.set_num_threads(config.train.threads)
        torch.manual_seed(config.seed)
        self.model = build_solver(self.task, config.solver).to(self.device)
        self.optimizer = ModelOptimizer(self.model, config.train)
        self.num_cases = len(self.task.train_cases)
        self.state = SolverState(num_cases=self.num_cases if config.train.curriculum is None else 1)
        self.checked = checked_cases(self.task)
        """The cases that decide whether the task is solved."""
        step = SolverStep(self.model, self.optimizer, config.train)
        self.step: Callable[..., tuple[Tensor, Tensor]] = step
        self.graphs: Captured | None = None
        if config.train.accelerate and self.device.type == "cuda":
            self.graphs = Captured(
                step.captured,
                max_graphs=4 * self.num_cases,
                clone=True,
                changes=self.model.parameters(),
                on_warning=on_line,
            )
        self.saved_config = to_dict(config)
        """The config in the folder, whose fields of the machine may differ."""
        self.has_config = False
        """Whether the folder has that config."""
        self._restore()

    @property
    def checkpoint(self) -> Path:
        return self.folder / CHECKPOINT

    def run(self) -> SolverState:
        """Trains until the end, or until it must stop; either way everything is saved.

        A loss that is not finite ends training too: what the model then answers is the result of this seed.
        """
        state, train = self.state, self.config.train
        if state.finished is not None:
            return state
        self.started, self.saved_at = time.monotonic() - state.seconds, time.monotonic()
        self.read: list[tuple[Tensor, Tensor]] = []
        """Losses and accuracies that are still on the device."""
        with repeatable(self.device, True), kernels_as_asked(train.accelerate), contextlib.ExitStack() as stack:
            if self.graphs is not None:
                stack.callback(self.graphs.forget)
            self.model.train()
            while state.finished is None:
                self._step()
                is_last = state.step == train.steps
                if (state.step % WINDOW == 0 or is_last) and self._read():
                    self._advance()
                if (state.step % train.check_every == 0 or is_last) and self._read():
                    self._check()
                self.on_step(state.step)
                stopping = self.must_stop()
                if stopping or state.finished or time.monotonic() - self.saved_at > 60 * train.checkpoint_minutes:
                    self._save()
                if stopping:
                    break
        return state

    def _step(self) -> None:
        state, config = self.state, self.config
        examples = examples_at(self.task, config.train, config.seed, state.step, state.num_cases)
        questions = Questions.of(examples, config.form, self.device)
        rate = learning_rate(config.train, state.step)
        places = () if questions.places is None else (questions.places,)
        torch.manual_seed(seed_of_step(config.seed, state.step))  # dropout depends only on the seed and the step
        if self.graphs is None:
            numbers = self.step(questions.tokens, questions.targets, rate, *places)
        else:
            on_device = torch.full((), rate, device=self.device)
            numbers = self.graphs(questions.tokens, questions.targets, on_device, *places)
        self.read.append(numbers)
        state.step += 1

    def _read(self) -> bool:
        """Brings losses and accuracies to the host; returns whether training goes on, as they are finite."""
        state = self.state
        if state.finished is not None or not self.read:
            return state.finished is None
        losses = torch.stack([loss for loss, _ in self.read]).tolist()
        rights = torch.stack([right for _, right in self.read]).tolist()
        self.read = []
        lost = next((place for place, loss in enumerate(losses) if not math.isfinite(loss)), None)
        if lost is not None:
            state.step += lost + 1 - len(losses)  # the same wherever the losses were read
            state.finished = DIVERGED
            self.on_line(f"step {state.step:,}: the loss is not finite: training diverged")
            return False
        state.pending += [list(pair) for pair in zip(losses, rights, strict=True)]
        state.recent += rights
        return True

    def _advance(self) -> None:
        """Adds the next case to those of the curriculum when the last steps were right often enough."""
        state, wanted = self.state, self.config.train.curriculum
        mean, state.recent = sum(state.recent) / len(state.recent), []
        if wanted is None:
            return
        earned = state.num_cases + (mean >= wanted)
        due = 2 * state.step * self.num_cases // self.config.train.steps  # all of them after half of the steps
        state.num_cases = min(max(earned, due), self.num_cases)

    def _check(self) -> None:
        """Measures how well cases beyond training are solved, and decides whether training ends."""
        state, train = self.state, self.config.train
        loss, right = (sum(one) / len(state.pending) for one in zip(*state.pending, strict=True))
        lowest = min((self._accuracy(case) for case in self.checked), default=0.0)
        state.curve.append([state.step, loss, right, state.num_cases, lowest])
        state.pending = []
        is_solved = train.stop_at is not None and bool(self.checked) and lowest >= train.stop_at
        state.solved_checks = state.solved_checks + 1 if is_solved else 0
        if state.solved_checks == 2:
            state.finished = "solved"
        elif state.step >= train.steps:
            state.finished = "all steps done"
        self.on_line(
            f"step {state.step:,}: loss {loss:.4f}, {right:.2%} right in training"
            + (f", at least {lowest:.2%} beyond it" if self.checked else "")
        )

    def _accuracy(self, case: Case) -> float:
        return measure_case(
            self.model,
            self.task,
            self.config.form,
            case,
            sequences=CHECK_SEQUENCES[self.config.form],
            stream=CHECKS,
            precision=self.config.train.precision,
        ).accuracy

    def _save(self) -> None:
        self._read()
        state = self.state
        state.seconds = time.monotonic() - self.started
        if not self.has_config:  # a kill may have left one of other settings, without a checkpoint
            write_json(self.folder / "config.json", seal(self.saved_config))
            self.has_config = True
        tensors = {f"model/{name}": one for name, one in self.model.state_dict().items()}
        tensors |= {f"optimizer/{name}": one for name, one in self.optimizer.tensors().items()}
        record = {"state": asdict(state), "config": checksum_of(self.saved_config)}
        save_tensors(self.checkpoint, tensors, record)
        self.saved_at = time.monotonic()

    def _restore(self) -> None:
        saved = read_checkpoint(self.config, self.folder)
        if saved is None:
            return
        try:
            self.saved_config, self.has_config = saved.config, True
            self.state = SolverState(**saved.record["state"])
            self.model.load_state_dict(_below("model/", saved.tensors))
            self.optimizer.restore(_below("optimizer/", saved.tensors))
        except (KeyError, TypeError, RuntimeError) as error:
            raise _misfit(self.checkpoint, str(error).splitlines()[0]) from None


def refuse_odd_solver(config: TaskRunConfig) -> None:
    """Raise a UserError if the model cannot be built, or cannot be trained on the device of the config."""
    device = device_named(config.train.device)
    try:
        with unallocated():
            solver = build_solver(task_named(config.task), config.solver)
        for module in solver.modules():
            if isinstance(module, Block):
                module.refuse_training_on(device)
    except ValueError as error:
        raise UserError(f"solver of {config.task}: {error}") from None


class SavedSolver(NamedTuple):
    """What the folder of a training holds."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    record: dict[str, Any]


def read_checkpoint(config: TaskRunConfig, folder: Path) -> SavedSolver | None:
    """Read what a training with this config has saved, if anything.

    Raise a UserError if it is damaged, or if the training in the folder has another config.
    """
    checkpoint, config_file = folder / CHECKPOINT, folder / "config.json"
    if not checkpoint.exists():
        return None
    if not config_file.exists():
        raise UserError(f"{config_file} is missing; {REMEDY}")
    saved = read_sealed(config_file, REMEDY)
    refuse_change(from_dict(TaskRunConfig, saved, str(config_file)), config, str(folder))
    tensors, record = load_tensors(checkpoint, REMEDY, required=True)
    if record.get("config") != checksum_of(saved):
        raise _misfit(checkpoint, "it belongs to another config.json")
    return SavedSolver(saved, tensors, record)


def _misfit(checkpoint: Path, reason: str) -> UserError:
    return UserError(f"{checkpoint} does not fit this version of logdepth or this run ({reason}); {REMEDY}")


def _below(prefix: str, tensors: dict[str, Any]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}
