"""Run a study. Completed runs are skipped, and interrupted runs are resumed.

STUDY/runs/ROW-SEED/                the run's folder
STUDY/results/RECIPE-SEED.json      written once the run is trained and evaluated, which completes the run
STUDY/results/timing-MACHINE.json   times of all models, measured together; written after each length
"""

import itertools
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from logdepth.atomic import alone, readable_disk_errors
from logdepth.data import DataConfig, Prepared, TokenStore, prepare_other
from logdepth.errors import UserError
from logdepth.progress import Part, Progress, in_words
from logdepth.recipes import parameters_of
from logdepth.reproduce.measure import (
    PASSES_OF_A_STEP,
    TIME_REPEATS,
    TIME_WARMUPS,
    machine_slug,
    measure_run,
    measure_times,
    measurements_file,
    seconds_per_token,
    timed_tokens,
)
from logdepth.reproduce.study import Study, flags_as_fields
from logdepth.results import (
    DataFacts,
    RunResult,
    TimingResult,
    read_result,
    read_results,
    refuse_other_text,
    write_result,
)
from logdepth.runs import RunConfig, RunFolder, TrainConfig, decisive, device_named
from logdepth.runs.environment import environment
from logdepth.training import (
    DivergedError,
    Interrupted,
    Watch,
    batches_of,
    checked_and_prepared,
    prepared_for,
    resume,
    train,
    use_threads,
)

TIMING = ("timing", 0)
"""Stands for the timing of all models, as (row, seed) stands for a run."""
MAX_LENGTHS_TO_PRINT = 8


class StudyOutcome(NamedTuple):
    """How a call of `run_study` ended."""

    finished: bool
    """Whether all requested work is done."""
    failed: list[str]
    """Runs that could not be trained, with the reasons."""


class BudgetSpentError(Exception):
    """The time budget of a study is spent. Everything is saved."""


def run_study(
    study: Study,
    out: Path,
    data_dir: Path | None = None,
    budget_minutes: float | None = None,
    *,
    timed: bool = True,
) -> StudyOutcome:
    """Run the unfinished work of a study until it is done or the budget is spent.

    Only one process at a time can work in a folder.

    Args:
        study: the study to run.
        out: folder of the study.
        data_dir: root data directory.
        budget_minutes: minutes after which to save and stop; by default there is no limit.
        timed: whether to time the models.
    """
    try:
        work = _Work(study, out, data_dir, budget_minutes, timed)
        work.prepare()
        with alone(
            out,
            f"another process is working on {out}; to run other models or seeds at the same time, choose another --out "
            "and copy its results here",
        ):
            return work.run()
    except UserError as error:
        raise UserError(flags_as_fields(str(error))) from None


class _Work:
    def __init__(
        self, study: Study, out: Path, data_dir: Path | None, budget_minutes: float | None, timed: bool
    ) -> None:
        self.study, self.out, self.data_dir, self.timed = study, out, data_dir, timed
        self.deadline = None if budget_minutes is None else time.monotonic() + 60 * budget_minutes
        self.failed: list[str] = []
        first = study.rows[study.models[0]]
        self.device = device_named(first.train.device)
        # Times are compared with each other, so all models are accelerated or none.
        configs = [study.rows[row].train for row in study.models]
        self.accelerated = all(train.accelerate for train in configs) and self.device.type == "cuda"
        self.compiled = all(train.compile for train in configs)
        use_threads(first)

    def prepare(self) -> None:
        """Check everything that can be checked before training starts."""
        refuse_unwritable(self.out)
        results = self.out / "results"
        done = {f"{run.recipe}-{run.config.seed}.json": run for run in read_results(results).runs}
        self.missing = [(row, config) for row, config in self.study.runs() if not self._is_done(row, config)]
        self.prepared: dict[tuple[str, int], Prepared] = {}
        new: dict[tuple[DataConfig, TrainConfig], Prepared] = {}  # seeds and rows share text, which is read once
        for row, config in self.missing:
            folder = RunFolder(self._folder(row, config))
            if folder.exists:
                _refuse_other_config(folder.config(), config, folder.path)
                _report_other_acceleration(folder.config().train, config.train, folder.path)
                prepared = prepared_for(folder, self.data_dir)
            else:
                folder.refuse_if_taken()
                kind = config.data, config.train
                prepared = new.get(kind) or new.setdefault(kind, checked_and_prepared(config, self.data_dir))
            self.prepared[row, config.seed] = prepared
        texts = {f"{row} seed {seed}": DataFacts.of(prepared) for (row, seed), prepared in self.prepared.items()}
        refuse_other_text({name: run.data for name, run in done.items()} | texts, self.out)
        self.others = self._other_texts()
        for row, config in self.missing:
            self._work_of(row, config)  # refuses a text that is shorter than a batch
        for (file, run), (name, store) in itertools.product(done.items(), self.others.items()):
            if any(other.name == name and other.text.sha256 != store.info.text_sha256 for other in run.others):
                raise UserError(
                    f"{results / file} was measured on another text named '{name}'; choose another name, or remove the "
                    "file to measure that run again"
                )

    def _other_texts(self) -> dict[str, TokenStore]:
        """Tokenize the other texts with the runs' common tokenizer."""
        found: dict[str, TokenStore] = {}
        if not self.study.others:
            return found
        config = self.study.rows[self.study.models[0]]
        prepared = next(iter(self.prepared.values()), None) or checked_and_prepared(config, self.data_dir)
        for name, path in self.study.others.items():
            store = prepare_other(config.data, prepared.tokenizer, "text", (path,), whole=True).stores["all"]
            if len(store) < 2:
                raise UserError(f"--others {name}: {path} has fewer than two tokens; give a longer text")
            found[name] = store
        return found

    def run(self) -> StudyOutcome:
        """Run all missing work."""
        must_time = self.timed and bool(self._lengths_to_time())
        shares = self._shares(must_time)
        with Progress(f"{self.study.corpus} study", 100, unit="%", done=100 - sum(shares.values())) as self.progress:
            try:
                for row, config in self.missing:
                    self._check_budget()
                    self._run_one(row, config, shares[row, config.seed])
                if must_time:
                    self._check_budget()
                    self._time_models(shares[TIMING])
            except BudgetSpentError:
                self.progress.say("the budget is spent; run the same command again to continue")
                return StudyOutcome(False, self.failed)
        return StudyOutcome(not self.failed, self.failed)

    def _run_one(self, row: str, config: RunConfig, share: float) -> None:
        """Train and evaluate one run. A run that cannot be trained is recorded, and the others continue."""
        label = f"{row} seed {config.seed}"
        folder = RunFolder(self._folder(row, config))
        prepared = self.prepared[row, config.seed]
        training = share * self._work_of(row, config).training_fraction
        watch = _StudyWatch(self.progress, label, training, self._is_spent)
        before = self.progress.done
        try:
            if folder.exists:
                state = resume(folder.path, self.data_dir, watch)
            else:
                state = train(config, folder.path, self.data_dir, watch)
            if self.progress.done == before:  # the run was already trained
                self.progress.skip(before + training)
            self.progress.update(before + training, label)
            part = Part(self.progress, f"{label}, evaluating", 1, share - training)
            result = measure_run(
                self.study, row, folder, state, prepared, self.others, self.device, part.update, self._check_budget
            )
        except Interrupted as stopped:
            if stopped.signal_number is None:
                raise BudgetSpentError from None
            raise
        except (DivergedError, torch.OutOfMemoryError) as error:
            self.failed.append(f"{label}: {flags_as_fields(str(error).splitlines()[0])}")
            self.progress.say(self.failed[-1])
            self.progress.update(before + share)
            return
        write_result(self._file(row, config), result)
        measurements_file(folder).unlink(missing_ok=True)
        part.update(1)
        main = result.main
        part.say(
            f"test perplexity {main.token_perplexity:.2f}, {main.bits_per_byte:.4f} bits per byte "
            f"at {main.context} tokens"
        )

    def _work_of(self, row: str, config: RunConfig) -> "_RunWork":
        """Count the forward passes of tokens that training and measuring a run take."""
        prepared = self.prepared.get((row, config.seed)) or next(iter(self.prepared.values()))
        train = config.train
        steps = train.max_steps or train.epochs * batches_of(config, prepared.stores["train"]).steps_per_epoch
        lengths, lengths_of_others = len(self.study.contexts), len(self.study.contexts_of_others(train.context))
        measured = lengths * len(prepared.stores["test"]) + lengths_of_others * sum(map(len, self.others.values()))
        return _RunWork(steps, PASSES_OF_A_STEP * train.batch_size * train.context, measured)

    def _shares(self, must_time: bool) -> dict[tuple[str, int], float]:
        """Estimate the percentage of the study that each missing piece of work takes, and print the estimate."""
        if not self.missing:
            return {TIMING: 100.0} if must_time else {}
        vocab_sizes = {row: one.tokenizer.vocab_size for (row, _), one in self.prepared.items()}
        vocab_size = max(vocab_sizes.values())
        costs_of_a_pass = {
            row: seconds_per_token(self.study.rows[row], vocab_sizes.get(row, vocab_size))
            if self.device.type == "cpu"
            else 1e-9 * parameters_of(self.study.rows[row])
            for row in self.study.models
        }
        costs = {
            (row, config.seed): costs_of_a_pass[row] * self._work_of(row, config).passes
            for row, config in self.study.runs()
        }
        tokens = timed_tokens(self.study, vocab_size, self.device) * len(self._lengths_to_time())
        timing = sum(costs_of_a_pass.values()) * tokens * (TIME_REPEATS + TIME_WARMUPS)
        costs[TIMING] = timing if must_time else 0.0
        self._print_estimate(costs_of_a_pass, costs[TIMING])
        whole = sum(costs.values())
        wanted = [(row, config.seed) for row, config in self.missing] + [TIMING] * must_time
        return {key: 100 * costs[key] / whole for key in wanted}

    def _print_estimate(self, costs_of_a_pass: dict[str, float], timing: float) -> None:
        """Print what is about to be done. The time that it takes is known only on a CPU."""
        training, evaluating, steps = 0.0, 0.0, 0
        for row, config in self.missing:
            work, folder = self._work_of(row, config), RunFolder(self._folder(row, config))
            done = max((line["step"] for line in folder.read_metrics()), default=0) if folder.exists else 0
            steps += work.steps - done
            training += costs_of_a_pass[row] * (work.steps - done) * work.passes_of_a_step
            evaluating += costs_of_a_pass[row] * work.measured
        runs = f"{len(self.missing)} run{'s' if len(self.missing) > 1 else ''}"
        lengths = ", ".join(f"{context:,}" for context in self.study.contexts[:MAX_LENGTHS_TO_PRINT])
        if len(self.study.contexts) > MAX_LENGTHS_TO_PRINT:
            lengths = f"{len(self.study.contexts)} lengths up to {self.study.contexts[-1]:,}"
        line = f"{self.study.corpus} study: {runs} with {steps:,} steps to train, evaluated at {lengths} tokens"
        if self.device.type == "cpu":
            parts = (("training", training), ("evaluation", evaluating), ("timing", timing))
            listed = ", ".join(f"{name} {in_words(seconds)}" for name, seconds in parts if seconds)
            line += f"; roughly {in_words(training + evaluating + timing)} at most: {listed}"
        print(line, file=sys.stderr, flush=True)

    def _time_models(self, share: float) -> None:
        """Time the models at the missing lengths. The file is written after each, and is complete after the last."""
        part = Part(self.progress, "timing", 1, share)
        missing = self._lengths_to_time()
        timed = None if set(missing) == set(self.study.time_contexts) else self._timed_alike()
        times = measure_times(
            self.study, self._rows_to_time(), missing, self.device, accelerated=self.accelerated, compiled=self.compiled
        )
        for number, result in enumerate(times, start=1):
            timed = result if timed is None else _joined(timed, result)
            write_result(self._timing_file(), timed)
            part.update(number / len(missing))
            if number < len(missing):
                self._check_budget()

    def _check_budget(self) -> None:
        """Raise BudgetSpentError if the budget is spent.

        This is called between pieces of work that are lost if they are not completed: an evaluation at one length, or
        the times at one length. Training checks at every step.
        """
        if self._is_spent():
            raise BudgetSpentError

    def _is_spent(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def _is_done(self, row: str, config: RunConfig) -> bool:
        """Return whether this run has a result. Raise a UserError if the file contains another run's result."""
        file = self._file(row, config)
        if not file.exists():
            return False
        result = read_result(file)
        if not isinstance(result, RunResult):
            raise UserError(f"{file} is not the result of a run; move it to another folder")
        _refuse_other_config(result.config, config, file)
        if missing := [context for context in self.study.contexts if result.at(context) is None]:
            raise UserError(f"{file} was not measured at {missing[0]} tokens; remove it to measure that run again")
        found = {one.name: {each.context for each in one.test} for one in result.others}
        if unknown := self.study.others.keys() - found.keys():
            raise UserError(f"{file} was not measured on {min(unknown)}; remove it to measure that run again")
        lengths = set(self.study.contexts_of_others(config.train.context))
        if shorter := [name for name in self.study.others if lengths - found[name]]:
            raise UserError(
                f"{file} was not measured on {shorter[0]} at {min(lengths - found[shorter[0]])} tokens; "
                "remove it to measure that run again"
            )
        return True

    def _lengths_to_time(self) -> list[int]:
        """Return the lengths at which the models are not timed yet on this machine in their current configs."""
        timed = self._timed_alike()
        done = set() if timed is None else {one.context for one in timed.models[0].timings}
        missing = [context for context in self.study.time_contexts if context not in done]
        if missing and timed is not None and timed.environment != environment(self.device):
            return list(self.study.time_contexts)  # times of other software cannot stand in one table with new ones
        return missing

    def _timed_alike(self) -> TimingResult | None:
        """Return the times of all rows to time in their current configs; None if any of them must be timed again."""
        timed = self._timed()
        precision = self.study.rows[self._rows_to_time()[0]].train.precision
        if timed is None or (timed.corpus, timed.precision) != (self.study.corpus, precision):
            return None
        sizes = {model.row: model.parameters for model in timed.models}
        wanted = {row: parameters_of(self.study.rows[row]) for row in self._rows_to_time()}
        return timed if sizes == wanted else None

    def _rows_to_time(self) -> list[str]:
        """Return the selected rows and those timed before. All are timed together, so that ratios are meaningful."""
        timed = self._timed()
        before = set() if timed is None else {model.row for model in timed.models}
        return [row for row in self.study.rows if row in before or row in self.study.models]

    def _timed(self) -> TimingResult | None:
        file = self._timing_file()
        if not file.exists():
            return None
        result = read_result(file)
        if not isinstance(result, TimingResult):
            raise UserError(f"{file} is not a timing result; move it to another folder")
        return result

    def _folder(self, row: str, config: RunConfig) -> Path:
        return self.out / "runs" / f"{row}-{config.seed}"

    def _file(self, row: str, config: RunConfig) -> Path:
        return self.out / "results" / f"{self.study.recipe(row)}-{config.seed}.json"

    def _timing_file(self) -> Path:
        how = ("-accelerated" if self.accelerated else "") + ("-compiled" if self.compiled else "")
        return self.out / "results" / f"timing-{machine_slug(self.device)}{how}.json"


class _RunWork(NamedTuple):
    """The work of a run, in forward passes of tokens."""

    steps: int
    passes_of_a_step: int
    measured: int

    @property
    def passes(self) -> int:
        return self.steps * self.passes_of_a_step + self.measured

    @property
    def training_fraction(self) -> float:
        return 1 - self.measured / self.passes


class _StudyWatch(Watch):
    """Hooks of a study into the training of one run: they report its progress and stop it when the budget is spent."""

    def __init__(self, whole: Progress, label: str, share: float, is_spent: Callable[[], bool]) -> None:
        self.whole, self.label, self.share, self.is_spent = whole, label, share, is_spent

    def progress(self, total_steps: int, done: int) -> Part:
        return Part(self.whole, self.label, total_steps, self.share, done=done)

    def must_stop(self) -> bool:
        return self.is_spent()


def _joined(timed: TimingResult, more: TimingResult) -> TimingResult:
    """Return times with those of one more length."""
    models = [
        replace(before, timings=tuple(sorted((*before.timings, *after.timings), key=lambda one: one.context)))
        for before, after in zip(timed.models, more.models, strict=True)
    ]
    return replace(more, models=tuple(models))


def refuse_unwritable(out: Path) -> None:
    """Raise a UserError if results cannot be written, before hours of work are lost."""
    for folder in (out, *(out / name for name in ("runs", "results", "tables", "figures"))):
        with readable_disk_errors(folder):
            existing = next(one for one in (folder, *folder.absolute().parents) if one.exists())
            if not existing.is_dir():
                raise UserError(f"cannot write {folder}: {existing} is a file; choose another --out")
            if not os.access(existing, os.W_OK | os.X_OK):
                raise UserError(f"cannot write {folder}: no permission to write {existing}; choose another --out")


def _report_other_acceleration(found: TrainConfig, wanted: TrainConfig, where: Path) -> None:
    for name in ("accelerate", "compile"):
        if getattr(found, name) != getattr(wanted, name):
            how = "with" if getattr(found, name) else "without"
            print(f"{where} resumes as it was started, {how} --{name}", file=sys.stderr)


def _refuse_other_config(found: RunConfig, wanted: RunConfig, where: Path) -> None:
    left, right = decisive(found), decisive(wanted)
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) != right.get(name):
            raise UserError(
                f"{where} was made with {name} {left.get(name)!r}, but this command sets {right.get(name)!r}; "
                "move it to another folder, or choose another --out"
            )
