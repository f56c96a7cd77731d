"""Working through a study: what is done is not done again, what was stopped or killed goes on.

STUDY/runs/ROW-SEED/                the run's folder
STUDY/results/RECIPE-SEED.json      written when the run is trained and measured: from then on the run is done
STUDY/results/timing-MACHINE.json   all models, timed in one sitting
"""

import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from logdepth.atomic import alone, readable_disk_errors
from logdepth.data import DataConfig, Prepared, TokenStore, prepare_other
from logdepth.errors import UserError
from logdepth.progress import Part, Progress
from logdepth.recipes import parameters_of
from logdepth.reproduce.measure import measure_run, measure_times, name_of_machine
from logdepth.reproduce.study import Study, in_fields
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
from logdepth.training import (
    DivergedError,
    Interrupted,
    Watch,
    checked_and_prepared,
    prepared_for,
    resume,
    train,
    use_threads,
)


class Progressed(NamedTuple):
    """How a sitting at a study ended."""

    finished: bool
    """Whether all that was asked for is done."""
    failed: list[str]
    """Runs that cannot be trained, and why."""


class BudgetSpentError(Exception):
    """The minutes given to a study are over; everything is saved."""


def work_on(
    study: Study,
    out: Path,
    data_dir: Path | None = None,
    budget_minutes: float | None = None,
    *,
    timed: bool = True,
) -> Progressed:
    """Does all that is not done yet, until the budget is spent. One process at a time works in a folder.

    Without `timed`, the models are not timed.
    """
    try:
        work = _Work(study, out, data_dir, budget_minutes, timed)
        work.prepare()
        with alone(out, f"another process works on {out}; do a part with another --out, and copy its results here"):
            return work.run()
    except UserError as error:
        raise UserError(in_fields(str(error))) from None


class _Work:
    def __init__(
        self, study: Study, out: Path, data_dir: Path | None, budget_minutes: float | None, timed: bool
    ) -> None:
        self.study, self.out, self.data_dir, self.timed = study, out, data_dir, timed
        self.deadline = None if budget_minutes is None else time.monotonic() + 60 * budget_minutes
        self.failed: list[str] = []
        first = study.rows[study.models[0]]
        self.device = device_named(first.train.device)
        # Of all models or of none: their times stand side by side.
        configs = [study.rows[row].train for row in study.models]
        self.accelerated = all(train.accelerate for train in configs) and self.device.type == "cuda"
        self.compiled = all(train.compile for train in configs)
        use_threads(first)

    def prepare(self) -> None:
        """Everything that can be known to be wrong is refused here, before any training."""
        _refuse_unwritable(self.out)
        self.missing = [(row, config) for row, config in self.study.runs() if not self._is_done(row, config)]
        self.prepared: dict[tuple[str, int], Prepared] = {}
        new: dict[tuple[DataConfig, TrainConfig], Prepared] = {}  # seeds and rows share their text: it is read once
        for row, config in self.missing:
            folder = RunFolder(self._folder(row, config))
            if folder.exists:
                _refuse_other_config(folder.config(), config, folder.path)
                _tell_of_other_speed(folder.config().train, config.train, folder.path)
                prepared = prepared_for(folder, self.data_dir)
            else:
                folder.refuse_if_taken()
                kind = config.data, config.train
                prepared = new.get(kind) or new.setdefault(kind, checked_and_prepared(config, self.data_dir))
            self.prepared[row, config.seed] = prepared
        texts = {f"{row} seed {seed}": DataFacts.of(prepared) for (row, seed), prepared in self.prepared.items()}
        results = self.out / "results"
        done = {f"{run.recipe}-{run.config.seed}.json": run for run in read_results(results).runs}
        refuse_other_text({name: run.data for name, run in done.items()} | texts, self.out)
        self.others = self._other_texts()
        for (file, run), (name, store) in itertools.product(done.items(), self.others.items()):
            if any(other.name == name and other.text.sha256 != store.info.text_sha256 for other in run.others):
                raise UserError(
                    f"{results / file} was measured on another text named '{name}'; call this one otherwise, or remove "
                    "the file to measure that run again"
                )

    def _other_texts(self) -> dict[str, TokenStore]:
        """In the tokens of the runs, which all have the same."""
        found: dict[str, TokenStore] = {}
        if not self.study.others:
            return found
        config = self.study.rows[self.study.models[0]]
        prepared = next(iter(self.prepared.values()), None) or checked_and_prepared(config, self.data_dir)
        for name, path in self.study.others.items():
            store = prepare_other(config.data, prepared.tokenizer, "text", (path,)).stores["test"]
            if len(store) < 2:
                raise UserError(f"--others {name}: {path} has no test split; name its file test.…")
            found[name] = store
        return found

    def run(self) -> Progressed:
        must_time = self.timed and self._must_time()
        shares = self._shares(must_time)
        with Progress(f"{self.study.corpus} study", 100, unit="%", done=100 - sum(shares.values())) as self.progress:
            try:
                for row, config in self.missing:
                    self._do_run(row, config, shares[row, config.seed])
                if must_time:
                    self._give_way()
                    self._do_times(shares["timing", 0])
            except BudgetSpentError:
                self.progress.say("the budget is spent; the same command goes on")
                return Progressed(False, self.failed)
        return Progressed(not self.failed, self.failed)

    def _do_run(self, row: str, config: RunConfig, share: float) -> None:
        """Trains and measures; what cannot be trained does not keep the others from it."""
        self._give_way()
        label = f"{row} seed {config.seed}"
        folder = RunFolder(self._folder(row, config))
        prepared = self.prepared[row, config.seed]
        training = share * self._part_that_is_training(config, prepared)
        watch = _StudyWatch(self.progress, label, training, self._is_spent)
        before = self.progress.done
        try:
            if folder.exists:
                state = resume(folder.path, self.data_dir, watch)
            else:
                state = train(config, folder.path, self.data_dir, watch)
        except Interrupted as stopped:
            if stopped.signal_number is None:
                raise BudgetSpentError from None
            raise
        except (DivergedError, torch.OutOfMemoryError) as error:
            self.failed.append(f"{label}: {in_fields(str(error).splitlines()[0])}")
            self.progress.say(self.failed[-1])
            self.progress.update(before + share)
            return
        if self.progress.done == before:  # it was trained before
            self.progress.skip(before + training)
        self.progress.update(before + training, label)
        part = Part(self.progress, f"{label}, measuring", 1, share - training)
        result = measure_run(self.study, row, folder, state, prepared, self.others, self.device, part.update)
        write_result(self._file(row, config), result)
        part.update(1)
        main = result.main
        part.say(
            f"test perplexity {main.token_perplexity:.2f}, {main.bits_per_byte:.4f} bits per byte "
            f"at {main.context} tokens"
        )

    def _part_that_is_training(self, config: RunConfig, prepared: Prepared) -> float:
        """Of a run, by tokens: a step of training is three forward passes."""
        train = config.train
        tokens = (train.max_steps or 0) * train.batch_size * train.context
        passes = 3 * (tokens or train.epochs * len(prepared.stores["train"]))
        measured = len(self.study.contexts) * len(prepared.stores["test"]) + 2 * sum(map(len, self.others.values()))
        return passes / (passes + measured)

    def _do_times(self, share: float) -> None:
        part = Part(self.progress, "timing", 1, share)
        rows = self._rows_to_time()
        times = measure_times(
            self.study, rows, self.device, part.update, accelerated=self.accelerated, compiled=self.compiled
        )
        write_result(self._timing_file(), times)

    def _give_way(self) -> None:
        """Measuring and timing keep nothing of what they have begun: the budget ends between them, or in training."""
        if self._is_spent():
            raise BudgetSpentError

    def _is_spent(self) -> bool:
        return self.deadline is not None and time.monotonic() > self.deadline

    def _shares(self, must_time: bool) -> dict[tuple[str, int], float]:
        """Per cent of the whole study that each piece of missing work takes, by parameters."""
        sizes = {row: parameters_of(self.study.rows[row]) for row in self.study.models}
        costs: dict[tuple[str, int], float] = {(row, config.seed): sizes[row] for row, config in self.study.runs()}
        costs["timing", 0] = 0.1 * sum(sizes.values())
        whole = sum(costs.values())
        wanted = [(row, config.seed) for row, config in self.missing] + [("timing", 0)] * must_time
        return {key: 100 * costs[key] / whole for key in wanted}

    def _is_done(self, row: str, config: RunConfig) -> bool:
        """Whether there is a result of just this run; one of another run in its place is an error."""
        file = self._file(row, config)
        if not file.exists():
            return False
        result = read_result(file)
        if not isinstance(result, RunResult):
            raise UserError(f"{file} is not the result of a run; move it away")
        _refuse_other_config(result.config, config, file)
        if missing := [context for context in self.study.contexts if result.at(context) is None]:
            raise UserError(f"{file} was not measured at {missing[0]} tokens; remove it to measure that run again")
        if unknown := self.study.others.keys() - {one.name for one in result.others}:
            raise UserError(f"{file} was not measured on {min(unknown)}; remove it to measure that run again")
        return True

    def _must_time(self) -> bool:
        """Unless this machine has timed all rows, as they are now, at all lengths."""
        timed = self._timed()
        if timed is None or timed.corpus != self.study.corpus:
            return True
        sizes = {model.row: model.parameters for model in timed.models}
        contexts = {tuple(one.context for one in model.timings) for model in timed.models}
        wanted = {row: parameters_of(self.study.rows[row]) for row in self._rows_to_time()}
        return sizes != wanted or contexts != {self.study.time_contexts}

    def _rows_to_time(self) -> list[str]:
        """Those asked for, and those that were timed before: ratios need one sitting."""
        timed = self._timed()
        before = set() if timed is None else {model.row for model in timed.models}
        return [row for row in self.study.rows if row in before or row in self.study.models]

    def _timed(self) -> TimingResult | None:
        file = self._timing_file()
        if not file.exists():
            return None
        result = read_result(file)
        if not isinstance(result, TimingResult):
            raise UserError(f"{file} is not a result of timing; move it away")
        return result

    def _folder(self, row: str, config: RunConfig) -> Path:
        return self.out / "runs" / f"{row}-{config.seed}"

    def _file(self, row: str, config: RunConfig) -> Path:
        return self.out / "results" / f"{self.study.recipe(row)}-{config.seed}.json"

    def _timing_file(self) -> Path:
        how = ("-accelerated" if self.accelerated else "") + ("-compiled" if self.compiled else "")
        return self.out / "results" / f"timing-{name_of_machine(self.device)}{how}.json"


class _StudyWatch(Watch):
    """A run within a study: its steps are steps of the whole, and the study's budget is its own."""

    def __init__(self, whole: Progress, label: str, share: float, is_spent: Callable[[], bool]) -> None:
        self.whole, self.label, self.share, self.is_spent = whole, label, share, is_spent

    def progress(self, total_steps: int, done: int) -> Part:
        return Part(self.whole, self.label, total_steps, self.share, done=done)

    def must_stop(self) -> bool:
        return self.is_spent()


def _refuse_unwritable(out: Path) -> None:
    """Where results could not be written after hours of work, none are begun."""
    for folder in (out, *(out / name for name in ("runs", "results", "tables", "figures"))):
        with readable_disk_errors(folder):
            existing = next(one for one in (folder, *folder.absolute().parents) if one.exists())
            if not existing.is_dir():
                raise UserError(f"cannot write {folder}: {existing} is a file; choose another --out")
            if not os.access(existing, os.W_OK | os.X_OK):
                raise UserError(f"cannot write {folder}: {existing} does not let us; choose another --out")


def _tell_of_other_speed(begun: TrainConfig, wanted: TrainConfig, where: Path) -> None:
    for name in ("accelerate", "compile"):
        if getattr(begun, name) != getattr(wanted, name):
            how = "with" if getattr(begun, name) else "without"
            print(f"{where} goes on as it was begun, {how} --{name}", file=sys.stderr)


def _refuse_other_config(found: RunConfig, wanted: RunConfig, where: Path) -> None:
    left, right = decisive(found), decisive(wanted)
    for name in sorted(left.keys() | right.keys()):
        if left.get(name) != right.get(name):
            raise UserError(
                f"{where} was made with {name} {left.get(name)!r}, not {right.get(name)!r} as asked for now; "
                "move it away, or choose another --out"
            )
