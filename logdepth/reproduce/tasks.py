"""Studies of tasks: which models are trained on which tasks with which settings, several runs at a time.

STUDY/runs/TASK-MODEL-SEED/           the config and the checkpoint of a run
STUDY/results/TASK-MODEL-SEED.json    written once the run is trained and tested, which completes it
"""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from logdepth.atomic import alone, write_text
from logdepth.config import from_dict, override, to_dict
from logdepth.data.locate import refuse_unprintable
from logdepth.errors import UserError, did_you_mean, not_enough_memory
from logdepth.models import num_parameters
from logdepth.models.encoder import EncoderConfig
from logdepth.progress import Progress
from logdepth.recipes import changes_in
from logdepth.reproduce.work import StudyOutcome, refuse_unwritable
from logdepth.runs.environment import environment, typed_command
from logdepth.solving import (
    SOLVERS,
    Form,
    SolverTrainer,
    TaskResult,
    TaskRunConfig,
    TaskTrainConfig,
    beyond,
    measure_case,
    percent,
    read_checkpoint,
    read_task_result,
    read_task_results,
    refuse_change,
    refuse_mixed_settings,
    refuse_odd_solver,
    solver_kind,
    write_task_result,
)
from logdepth.tasks import LDRU_LANGUAGES, TASKS, Case, task_named, tasks_of
from logdepth.training import Interrupted, StopRequest, stop_signals

POLL_SECONDS = 0.2
"""Seconds between looks at runs that train beside each other."""
REASON = "failed.txt"
"""File in the folder of a run that says why it failed, until the study has read it."""
TRAINING_SHARE = 0.8
"""Share of the work of a run that is its training, in the progress that is shown."""
DONE, FAILED, STOPPED = 0, 1, 3
"""Exit codes of a process that works on a run."""


@dataclass(frozen=True, kw_only=True)
class TaskStudy:
    """Models that are trained on the tasks of one family."""

    name: str
    """Name of the study, which is that of the family."""
    title: str
    """As reports print it."""
    solvers: tuple[str, ...]
    """Models that it compares."""
    width: int
    """Width of the models."""
    settings: Callable[[str, str], TaskTrainConfig]
    """The settings of a task for a model, by their names."""
    dropout: Callable[[str], float] = lambda _task: 0.0
    """Dropout of an encoder on a task."""

    def run(self, task: str, solver: str, seed: int) -> TaskRunConfig:
        """The config of a run."""
        kind = solver_kind(solver)
        config = kind.config(self.width)
        if isinstance(config, EncoderConfig):
            config = replace(config, dropout=self.dropout(task))
        form: Form = "whole" if kind.is_encoder else "prefixes"
        return TaskRunConfig(task=task, form=form, solver=config, seed=seed, train=self.settings(task, solver))


LANGUAGE_MODELS = tuple(name for name, kind in SOLVERS.items() if not kind.is_encoder)
ENCODERS = tuple(name for name, kind in SOLVERS.items() if kind.is_encoder)
LONG_TASKS = {"modular-arithmetic", "d4", "d6", "d8", "d12"}
"""Tasks that the LDRU paper trains for ten times as many steps."""
DELETANG_TASKS = {"parity", "even-pairs", "cycle-navigation", "modular-arithmetic"}


def _regular(task: str, solver: str) -> TaskTrainConfig:
    steps = 1_000_000 if task in LONG_TASKS else 100_000
    if solver in ENCODERS:  # the settings of the LDRU paper
        rate = 1e-4 if task.startswith("d") and task in LONG_TASKS else 1e-3
        return TaskTrainConfig(optimizer="amsgrad", learning_rate=rate, steps=steps, batch_size=256, check_every=1_000)
    return TaskTrainConfig(steps=20_000, batch_size=256, warmup_steps=100, schedule="cosine", check_every=1_000)


def _groups(_task: str, _solver: str) -> TaskTrainConfig:
    return TaskTrainConfig(
        steps=60_000,
        batch_tokens=1_024,
        curriculum=0.98,
        warmup_steps=100,
        learning_rate=2e-3,
        schedule="cosine",
        check_every=2_000,
    )


def _recall(_task: str, _solver: str) -> TaskTrainConfig:
    return TaskTrainConfig(
        steps=20_000,
        batch_tokens=16_384,
        warmup_steps=500,
        schedule="cosine",
        weight_decay=0.1,
        betas=(0.9, 0.95),
        check_every=1_000,
    )


def _context_free(_task: str, _solver: str) -> TaskTrainConfig:
    return TaskTrainConfig(steps=50_000, batch_size=256, warmup_steps=100, schedule="cosine", check_every=2_000)


TASK_STUDIES: dict[str, TaskStudy] = {
    "regular-languages": TaskStudy(
        name="regular-languages",
        title="Regular languages",
        solvers=(*ENCODERS, *LANGUAGE_MODELS),
        width=64,
        settings=_regular,
        dropout=lambda task: 0.1 if task in DELETANG_TASKS else 0.25,
    ),
    "context-free": TaskStudy(
        name="context-free",
        title="Context-free tasks",
        solvers=LANGUAGE_MODELS,
        width=128,
        settings=_context_free,
    ),
    "groups": TaskStudy(
        name="groups", title="Word problems of groups", solvers=LANGUAGE_MODELS, width=128, settings=_groups
    ),
    "recall": TaskStudy(name="recall", title="Recall", solvers=LANGUAGE_MODELS, width=128, settings=_recall),
}
"""The studies of `logdepth reproduce` that train models on tasks."""


TASKS_OF_STUDIES = {"regular-languages": LDRU_LANGUAGES}
"""Tasks that a study trains on by default, where these are not all of its family."""


def task_runs(
    study: TaskStudy,
    tasks: Sequence[str] = (),
    solvers: Sequence[str] = (),
    seeds: Sequence[int] = (),
    overrides: Sequence[Path] = (),
    *,
    accelerate: bool = True,
) -> list[tuple[str, TaskRunConfig]]:
    """The model and the config of every selected run, seed by seed, so that an unfinished study covers all models.

    Args:
        study: the study.
        tasks: its tasks to train on; by default all.
        solvers: its models to train; by default all.
        seeds: by default 0, 1 and 2.
        overrides: JSON files with changes to the configs of all runs.
        accelerate: clear `TaskTrainConfig.accelerate` if False.
    """
    of_family = tasks_of(study.name)
    for task in tasks:
        if task not in of_family:
            elsewhere = f"; it belongs to `logdepth reproduce {TASKS[task].family}`" if task in TASKS else ""
            hint = elsewhere or did_you_mean(task, of_family)
            raise UserError(f"there is no task '{task}' in the study {study.name}{hint}")
    for solver in solvers:
        if solver not in study.solvers:
            raise UserError(
                f"there is no model '{solver}' in the study {study.name}{did_you_mean(solver, study.solvers)}"
            )
    if len(set(seeds)) < len(seeds) or any(not 0 <= seed < 2**63 for seed in seeds):
        raise UserError(f"--seeds must be different non-negative integers; got {' '.join(map(str, seeds))}")
    of_study = TASKS_OF_STUDIES.get(study.name, tuple(of_family))
    once = dict.fromkeys  # named twice, a run would train twice at the same time
    found = []
    changes = [(file, changes_in(file)) for file in overrides]
    for seed in seeds or (0, 1, 2):
        for task in once(tasks or of_study):
            for solver in once(solvers or study.solvers):
                config = study.run(task, solver, seed)
                for file, change in changes:
                    config = override(config, change, str(file))
                    if (config.task, config.seed) != (task, seed):
                        raise UserError(f"{file} would change the task or the seed; remove these fields")
                if not accelerate:
                    config = replace(config, train=replace(config.train, accelerate=False))
                found.append((solver, config))
    return found


def run_task_study(
    runs: Sequence[tuple[str, TaskRunConfig]],
    out: Path,
    *,
    lanes: int = 1,
    longest: int | None = None,
    budget_minutes: float | None = None,
) -> StudyOutcome:
    """Train and test all runs that have no complete result yet.

    Args:
        runs: models and configs, as `task_runs` gives them.
        out: the folder of the study.
        lanes: how many runs train at the same time, each in a process of its own.
        longest: the longest test length; by default all test cases of a task.
        budget_minutes: minutes after which to save and stop.
    """
    if lanes < 1:
        raise UserError(f"--lanes must be at least 1; got {lanes}")
    refuse_unprintable(out, "choose another --out")
    work = [_Run(solver, config, out, tuple(_tests(config.task, longest))) for solver, config in runs]
    refuse_unwritable(out)
    there = read_task_results(out / "results")  # also those of other runs, which the report will show
    missing = [one for one in work if not one.is_complete()]
    refuse_mixed_settings(
        {f"{out}/results/{one.name}.json": (one.solver, one.config) for one in there}
        | {f"{one.name} of this study": (one.solver, to_dict(one.config)) for one in missing}
    )
    for config in {(one.solver, one.config.task): one.config for one in missing}.values():
        refuse_odd_solver(config)
    for one in missing:  # what is damaged is refused before the work begins
        read_checkpoint(one.config, one.folder)
    with alone(out, f"another process is working on {out}; choose another --out"):
        deadline = None if budget_minutes is None else time.monotonic() + 60 * budget_minutes
        with StopRequest() as stop, Progress(str(out), len(missing), unit="runs") as progress:
            where = _Here if lanes == 1 else _Lanes
            failed = where(missing, lanes, stop, deadline, progress).run()
        if stop.signal_number is not None:
            raise Interrupted(None, stop.signal_number)
        return StudyOutcome(all(one.is_complete() for one in missing), failed)


def _tests(task: str, longest: int | None) -> list[Case]:
    """The test cases of a task up to a length; at least one of them is beyond training."""
    every = task_named(task).test_cases
    cases = [case for case in every if longest is None or case.length <= longest]
    if not beyond(task_named(task), cases):
        least = min(case.length for case in beyond(task_named(task), every))
        raise UserError(f"--longest is {longest}: the test of {task} beyond its training begins at {least}")
    return cases


@dataclass(frozen=True)
class _Run:
    """One run of a study."""

    solver: str
    config: TaskRunConfig
    out: Path
    tests: tuple[Case, ...]

    @property
    def name(self) -> str:
        return f"{self.config.task}-{self.solver}-{self.config.seed}"

    @property
    def folder(self) -> Path:
        return self.out / "runs" / self.name

    def result(self) -> TaskResult | None:
        """Its result file, if there is one. Raise a UserError if that is of another config."""
        path = self.out / "results" / f"{self.name}.json"
        if not path.exists():
            return None
        result = read_task_result(path)
        refuse_change(from_dict(TaskRunConfig, result.config, str(path)), self.config, str(path))
        return result

    def is_complete(self) -> bool:
        result = self.result()
        return result is not None and {one.case for one in result.test} >= set(self.tests)


class _Here:
    """Runs that train one after the other in this process."""

    def __init__(
        self, missing: Sequence[_Run], lanes: int, stop: StopRequest, deadline: float | None, progress: Progress
    ) -> None:
        self.missing, self.lanes, self.stop, self.deadline, self.progress = missing, lanes, stop, deadline, progress
        self.failed: list[str] = []
        """What could not be trained, with reasons."""

    def must_stop(self) -> bool:
        is_over = self.deadline is not None and time.monotonic() >= self.deadline
        return self.stop.signal_number is not None or is_over

    def run(self) -> list[str]:
        """Work until all is done or must stop; return what could not be trained, with reasons."""
        for number, run in enumerate(self.missing):
            if self.must_stop():
                break
            try:
                _trained_and_tested(run, self._progress_of(number), self.must_stop, self.progress.say)
            except torch.OutOfMemoryError as error:
                self.failed.append(f"{run.name}: {not_enough_memory(error) or 'not enough memory'}")
        return self.failed

    def _progress_of(self, number: int) -> Callable[[float], None]:
        return lambda share: self.progress.update(round(number + share, 2))


class _Lanes(_Here):
    """Runs that train beside each other, each in a process."""

    def run(self) -> list[str]:
        self.processes: dict[int, BaseProcess] = {}
        self.context = multiprocessing.get_context("spawn")
        self.shares: Any = self.context.Array("d", len(self.missing) or 1, lock=False)
        """Which share of each run is done."""
        waiting, stopping = list(range(len(self.missing)))[::-1], False
        while waiting or self.processes:
            if self.must_stop() and not stopping:
                stopping, waiting = True, []
                for process in self.processes.values():
                    process.terminate()  # which a run takes as a request to save and stop
            while waiting and len(self.processes) < self.lanes:
                self._start(waiting.pop())
            time.sleep(POLL_SECONDS)
            self._collect()
            self.progress.update(round(sum(self.shares), 2))
        return self.failed

    def _start(self, number: int) -> None:
        arguments = (self.missing[number], number, self.shares, os.getpid())
        process = self.context.Process(target=_work, args=arguments)
        # A child that still imports has nothing to save, so SIGTERM ends it. An interrupt would show its traceback.
        resource_tracker.ensure_running()  # its first start would unblock signals
        before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        process.start()
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.processes[number] = process

    def _collect(self) -> None:
        for number, process in list(self.processes.items()):
            if process.is_alive():
                continue
            process.join()
            del self.processes[number]
            run = self.missing[number]
            reason = run.folder / REASON
            if process.exitcode == DONE:
                self.shares[number] = 1.0
            elif process.exitcode == FAILED and reason.is_file():
                self.failed.append(f"{run.name}: {reason.read_text(encoding='utf-8')}")
                reason.unlink()
            elif process.exitcode != STOPPED and not (self.must_stop() and -(process.exitcode or 0) in stop_signals()):
                self.failed.append(f"{run.name}: {_end_of(process.exitcode)}; run it again")


def _end_of(code: int | None) -> str:
    if code == -signal.SIGKILL:
        return "its process was killed, as systems do when memory runs out"
    return f"its process ended with code {code}"


def _work(run: _Run, number: int, shares: Any, parent: int) -> None:
    """Train and test one run, in a process of its own."""
    if run.config.train.threads is None:  # lanes share the cores
        run = replace(run, config=replace(run.config, train=replace(run.config.train, threads=1)))
    received: list[int] = []
    for one in stop_signals():  # however many come: what is being saved is saved
        signal.signal(one, lambda signal_number, _: received.append(signal_number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals())

    def must_stop() -> bool:
        return bool(received) or os.getppid() != parent

    def on_progress(share: float) -> None:
        shares[number] = share

    run.folder.mkdir(parents=True, exist_ok=True)
    (run.folder / REASON).unlink(missing_ok=True)  # left by a study that was killed
    try:
        sys.exit(DONE if _trained_and_tested(run, on_progress, must_stop, _print_line) else STOPPED)
    except Exception as error:
        reason = str(error) if isinstance(error, UserError) else not_enough_memory(error)
        if reason is None:
            raise
        write_text(run.folder / REASON, " ".join(reason.split()))
        sys.exit(FAILED)


class _StoppedError(Exception):
    """The test of a run was asked to stop."""


def _print_line(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _trained_and_tested(
    run: _Run, on_progress: Callable[[float], None], must_stop: Callable[[], bool], on_line: Callable[[str], None]
) -> bool:
    """Whether the run is complete; otherwise it was asked to stop."""

    def say(line: str) -> None:
        on_line(f"{run.name}: {line}")

    def on_step(step: int) -> None:
        on_progress(TRAINING_SHARE * step / run.config.train.steps)

    trainer = SolverTrainer(run.config, run.folder, on_step=on_step, must_stop=must_stop, on_line=say)
    state = trainer.run()
    if state.finished is None:
        return False
    task, curve = task_named(run.config.task), tuple(tuple(point) for point in state.curve)
    before = run.result()
    # The run may have been trained again since then, on another machine: these weights have results of their own.
    is_same = before is not None and (before.steps, before.curve) == (state.step, curve)
    test = {one.case: one for one in before.test} if before is not None and is_same else {}

    def stop_if_asked() -> None:
        if must_stop():
            raise _StoppedError

    for number, case in enumerate(run.tests):
        try:
            stop_if_asked()
            if case not in test:
                test[case] = measure_case(
                    trainer.model,
                    task,
                    run.config.form,
                    case,
                    precision=run.config.train.precision,
                    stop_if_asked=stop_if_asked,
                )
        except _StoppedError:
            return False
        on_progress(TRAINING_SHARE + (1 - TRAINING_SHARE) * (number + 1) / len(run.tests))
    result = TaskResult(
        solver=run.solver,
        config=to_dict(run.config),
        parameters=num_parameters(trainer.model),
        steps=state.step,
        finished=state.finished,
        seconds=round(state.seconds, 1),
        curve=curve,
        test=tuple(test[case] for case in task.test_cases if case in test),
        environment=environment(trainer.device),
        command=typed_command(),
    )
    write_task_result(run.out / "results", result)
    say(f"{state.finished} after {state.step:,} steps; {percent(result.score)} % right beyond the training lengths")
    return True
