"""A worker of a sweep: it runs trials, and takes over those of dead workers, until the study is finished.

Any number of workers may run. The same command starts each of them, and they share only the storage. `ledger`
interprets the list of trials.
"""

import contextlib
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import optuna
import torch
from optuna.exceptions import UpdateFinishedTrialError
from optuna.trial import Trial, TrialState

import logdepth
from logdepth.atomic import alone
from logdepth.checksums import seal
from logdepth.config import difference, flattened, override, to_dict
from logdepth.data.locate import refuse_unprintable
from logdepth.errors import UserError
from logdepth.progress import Part, Progress, in_words
from logdepth.recipes import recipe
from logdepth.runs import MACHINE_FIELDS, RunConfig, RunFolder, decisive
from logdepth.runs.environment import typed_command
from logdepth.sweep.heartbeat import Heartbeat, LivenessMonitor, count_alive, prune_dead_workers, registered_worker
from logdepth.sweep.ledger import DEATHS, FINISHED, GIVEN_BACK, ORIGIN, RETRY_OF, SURPLUS, Ledger, retry_of
from logdepth.sweep.outcome import REASON, SECONDS, STEPS, best_of, draw, rows_of, write_tables
from logdepth.sweep.space import Choices, Range, changes, described
from logdepth.sweep.storage import open_storage, readable_storage_errors
from logdepth.sweep.study import TERMS, TEXT, Search, check_attribute, check_terms, open_study
from logdepth.sweep.watch import TrialPart, TrialWatch
from logdepth.training import (
    DivergedError,
    Interrupted,
    TrainState,
    batches_of,
    checked_and_prepared,
    resume,
    stop_signals,
    train,
    with_absolute_paths,
)

POLL_SECONDS = 1.0
"""Seconds between checks of other workers' trials."""
DRAW_SECONDS = 60.0
"""Minimum seconds between redrawing the figures. The tables are written after every trial."""
MAX_DEATHS = 3
"""A trial is given up after this many workers have died while running it, because it might kill all others too."""


def work(search: Search) -> dict[str, Any]:
    """Run trials of a study until it is finished; return the contents of sweep.json.

    On SIGINT, SIGTERM or SIGHUP, return the current trial to the queue and raise Interrupted.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    _check(search)
    prepared = checked_and_prepared(search.config, search.data_dir)
    with readable_storage_errors(search.storage), _signals_raise():
        storage = open_storage(search.storage, search.out / "journal.log")
        study = open_study(search, storage)
        check_terms(study, search)
        _refuse_trials_of_another_study(search, study)
        check_attribute(study, {"the text": prepared.key}, TEXT)
        created_with = study.user_attrs[TERMS]["version"]
        if created_with != logdepth.__version__:
            print(
                f"this study was created with logdepth {created_with}; this is logdepth {logdepth.__version__}",
                file=sys.stderr,
            )
        with registered_worker(search.out / "workers") as name:
            return Worker(search, study, name).run()


def _check(search: Search) -> None:
    if search.trials < 1:
        raise UserError(f"--trials must be at least 1; got {search.trials}")
    if not 0 < search.grace < math.inf:
        raise UserError(f"--grace must be above 0 and finite; got {search.grace}")
    refuse_unprintable(search.out, "choose another --out")


def _refuse_trials_of_another_study(search: Search, study: optuna.Study) -> None:
    trials = search.out / "trials"
    if trials.is_dir() and any(trials.iterdir()) and not study.get_trials(deepcopy=False):
        raise UserError(f"{trials} contains trials, but the study '{search.study}' has none; choose another --out")


class Worker:
    """One process that runs trials of a study."""

    def __init__(self, search: Search, study: optuna.Study, name: str) -> None:
        self.search, self.study, self.name = search, study, name
        # The journal is in `out`, where all its workers register; those of a database may have other folders.
        in_journal = search.storage is None
        self.monitor = LivenessMonitor(search.out / "workers", search.grace, all_register=in_journal)
        self.drawn_at = time.monotonic()
        self.threads = torch.get_num_threads()
        """Number of CPU threads to use if no other worker runs on this machine."""
        self.skipped_figures: str | None = None
        """A message about figures that were skipped."""

    def run(self) -> dict[str, Any]:
        limit = self.search.trials
        for trial in self._ledger().latest(*FINISHED):
            # A killed worker may not have done this.
            self._remove_training_files(self._folder(trial.user_attrs.get(ORIGIN, trial.number)))
        done = self._percent(self._ledger())
        with Progress("sweep", 100, unit="%", done=done) as self.progress:
            while not (ledger := self._ledger()).is_finished(limit):
                self._requeue_failed(ledger)
                if len(ledger.origins) < limit or self._ledger().latest(TrialState.WAITING):
                    self._run_next()
                elif self.search.wait:
                    self.progress.update(self._percent(ledger), "waiting for the trials of other workers")
                    time.sleep(POLL_SECONDS)
                else:
                    break
            self.progress.update(self._percent(self._ledger()))
        prune_dead_workers(self.search.out / "workers")
        return self._write(last=True)

    def _ledger(self) -> Ledger:
        """Read the current list of trials."""
        return Ledger(self.study.get_trials(deepcopy=False))

    def _percent(self, ledger: Ledger) -> float:
        return 100 * min(1, len(ledger.latest(*FINISHED)) / self.search.trials)

    def _requeue_failed(self, ledger: Ledger) -> None:
        """Mark the trials of dead workers as failed, and queue all failed trials again."""
        for trial in ledger.latest(TrialState.RUNNING):
            if self.monitor.is_dead(trial):
                self._end(trial.number, TrialState.FAIL)
        for trial in self._ledger().latest(TrialState.FAIL):
            params, attributes = retry_of(trial)
            self.study.enqueue_trial(params, attributes)

    def _run_next(self) -> None:
        """Run a waiting trial, or else a new one."""
        trial = self.study.ask()
        try:
            check_terms(self.study, self.search)  # workers that create a study at the same time may set different terms
            reason = self._ledger().reason_to_drop(trial.number, self.search.trials)
            if reason is not None:
                trial.set_user_attr(SURPLUS, reason)
                self._end(trial.number, TrialState.FAIL)
                return
            with Heartbeat(trial, self.name) as heart:
                self._run_trial(trial, heart)
        except UpdateFinishedTrialError:
            self.progress.say(f"trial {_origin(trial)}: another worker has taken it over")
            return
        except BaseException as error:
            expected = isinstance(error, UserError | Interrupted) or not isinstance(error, Exception)
            self._give_back(trial, clean=expected)
            raise
        self._report(_origin(trial))

    def _run_trial(self, trial: Trial, heart: Heartbeat) -> None:
        """Train a trial, from its checkpoint if it has one, and record its result in the study."""
        origin = _origin(trial)
        # Every trial has its own sampler seed, so that two workers never propose the same values.
        self.study.sampler = _sampler(self.search.config.seed, origin, self.search.trials)
        values = {name: _suggest(trial, name, one) for name, one in self.search.space.items()}
        if trial.user_attrs.get(DEATHS, 0) >= MAX_DEATHS:
            self._prune(trial, f"given up: {MAX_DEATHS} workers died while running it")
            return
        try:
            config = override(self.search.config, changes(self.search.config, values))
        except UserError as error:  # the space was checked field by field; a combination may be invalid
            self._prune(trial, f"refused: {error}")
            return
        self._share_cores()
        folder = self._folder(origin)
        try:
            state = self._train(config, folder, TrialWatch(trial, heart, folder, self._part(origin)))
        except optuna.TrialPruned:
            self._prune(trial, "worse than the median of the other trials", folder)
        except DivergedError:
            self._prune(trial, "training diverged", folder)
        except torch.OutOfMemoryError:
            self._prune(trial, "out of memory", folder)
        except RefusedError as error:
            self._prune(trial, f"refused: {error}")
        else:
            self._record(trial, folder)
            self._finish(trial, TrialState.COMPLETE, state.best_loss)
            self._remove_training_files(folder)

    def _share_cores(self) -> None:
        """Divide the CPU threads among the workers of this machine. Sharing all cores would be many times slower."""
        if self.search.config.train.threads is None:
            alive = count_alive(self.search.out / "workers")
            torch.set_num_threads(max(1, self.threads // max(1, alive)))

    def _train(self, config: RunConfig, folder: RunFolder, watch: TrialWatch) -> TrainState:
        if not folder.exists:
            _refuse_untrainable(config, self.search.data_dir)
            return train(config, folder.path, self.search.data_dir, watch)
        if decisive(folder.config()) != decisive(config):
            raise UserError(f"{folder.path} contains a run of another study; choose another --out")
        return resume(folder.path, self.search.data_dir, watch)

    def _prune(self, trial: Trial, reason: str, folder: RunFolder | None = None) -> None:
        trial.set_user_attr(REASON, reason)
        if folder is not None:
            self._record(trial, folder)
        self._finish(trial, TrialState.PRUNED)
        if folder is not None:
            self._remove_training_files(folder)

    def _record(self, trial: Trial, folder: RunFolder) -> None:
        """Record the trial's steps and training time over all its attempts."""
        lines = folder.read_metrics() or [{"step": 0, "seconds": 0.0}]
        trial.set_user_attr(STEPS, max(line["step"] for line in lines))
        trial.set_user_attr(SECONDS, max(line["seconds"] for line in lines))

    def _finish(self, trial: Trial, state: TrialState, loss: float | None = None) -> None:
        """End the trial in the study, or raise UpdateFinishedTrialError if another worker has taken it over."""
        if not self._end(trial.number, state, loss):
            raise UpdateFinishedTrialError

    def _end(self, number: int, state: TrialState, loss: float | None = None) -> bool:
        """End a running trial; return whether this worker did. Only one worker succeeds."""
        try:
            self.study.tell(number, loss, state)
        except (ValueError, UpdateFinishedTrialError):  # the trial has already ended
            return False
        return True

    def _give_back(self, trial: Trial, *, clean: bool) -> None:
        """Return an unfinished trial to the queue. If that fails, other workers will take it over."""
        with contextlib.suppress(Exception):
            if clean:
                trial.set_user_attr(GIVEN_BACK, True)
            if self._end(trial.number, TrialState.FAIL):
                self._requeue_failed(self._ledger())

    def _folder(self, origin: int) -> RunFolder:
        return RunFolder(self.search.out / "trials" / f"{origin:04d}")

    def _part(self, origin: int) -> Callable[[int], Part]:
        """Return a function from a trial's number of steps to its part of the sweep's progress."""
        share = 100 / self.search.trials
        return lambda steps: TrialPart(self.progress, f"trial {origin}", steps, share)

    def _remove_training_files(self, folder: RunFolder) -> None:
        """Remove the files that only an unfinished run needs."""
        for file in (folder.checkpoint, folder.weights("best"), folder.weights("last"), folder.path / "lock"):
            file.unlink(missing_ok=True)

    def _report(self, origin: int) -> None:
        """Write the outcome so far and print one line about a finished trial."""
        record = self._write()
        row = next(row for row in record["trials"] if row["trial"] == origin)
        over = sum(row["state"] in ("complete", "pruned") for row in record["trials"])
        percent = 100 * min(1, over / self.search.trials)
        params = ", ".join(f"{name} {_rounded(value)}" for name, value in row["params"].items())
        loss = "" if row["loss"] is None else f" {row['loss']:.4f}"
        how = f"validation loss{loss}" if row["state"] == "complete" else f"pruned{loss} ({row['reason']})"
        best = record["best"]
        so_far = "" if best is None else f"; best so far {best['loss']:.4f} (trial {best['trial']})"
        left = max(0, self.search.trials - over)
        gained = percent - self.progress.first
        seconds = (time.monotonic() - self.progress.started) * (100 - percent) / gained if gained > 0 else 0.0
        soon = f"; {left} trials left, about {in_words(seconds)}" if left else "; all trials finished"
        self.progress.say(f"trial {origin}: {how}; {params}{so_far}{soon}")
        self.progress.update(percent)

    def _write(self, *, last: bool = False) -> dict[str, Any]:
        """Write the outcome so far; return the contents of sweep.json."""
        search = self.search
        with alone(search.out):  # held from reading to writing, so that no worker overwrites newer results
            rows = rows_of(self._ledger(), search.trials)
            best = best_of(rows)
            best_config = None if best is None else changes_of_best(search, best["params"])
            record = seal(
                {
                    "recipe": search.recipe,
                    "study": search.study,
                    "version": logdepth.__version__,
                    "space": described(search.space),
                    "config": to_dict(with_absolute_paths(search.config)),
                    "best": best,
                    "best_config": best_config,
                    "command": typed_command(),
                    "trials": rows,
                }
            )
            write_tables(search.out, record)
            if last or time.monotonic() - self.drawn_at > DRAW_SECONDS:
                self.skipped_figures = draw(search.out, rows, self.study)
                self.drawn_at = time.monotonic()
        if last and self.skipped_figures:
            self.progress.say(self.skipped_figures)
        return record


def changes_of_best(search: Search, params: dict[str, Any]) -> dict[str, Any]:
    """Return the changes to the recipe that reproduce a trial, including those from the sweep's flags.

    Paths are absolute, because the changes may be used from another working directory.
    """
    config = with_absolute_paths(search.config)
    asked = flattened(difference(to_dict(recipe(search.recipe)), to_dict(config)))
    excluded = MACHINE_FIELDS - {"data.paths"} | {"seed"}
    fields = {name: value for name, value in asked.items() if name not in excluded}
    return changes(search.config, fields | flattened(changes(search.config, params)))


class RefusedError(Exception):
    """A point of the search space that cannot be trained on any machine."""


def _refuse_untrainable(config: RunConfig, data_dir: Path | None) -> None:
    """Raise RefusedError if the config cannot be trained on any machine. Other errors may depend on the machine."""
    store = checked_and_prepared(config, data_dir).stores["train"]
    store.verify()  # here, because a damaged file says nothing about the config
    try:
        batches_of(config, store)
    except UserError as error:
        raise RefusedError(str(error)) from None


def _suggest(trial: Trial, name: str, one: Range | Choices) -> Any:
    if isinstance(one, Choices):
        return trial.suggest_categorical(name, one.values)
    if isinstance(one.low, int):
        return trial.suggest_int(name, one.low, int(one.high), log=one.log, step=int(one.step or 1))
    return trial.suggest_float(name, one.low, one.high, log=one.log, step=one.step)


def _sampler(seed: int, origin: int, trials: int) -> optuna.samplers.BaseSampler:
    """Return a TPE sampler. A third of the trials, but from four to ten, are sampled at random first."""
    own = int(np.random.SeedSequence([seed, origin]).generate_state(1)[0])
    at_random = max(4, min(10, trials // 3))
    # constant_liar avoids the values of trials that other workers are running.
    return optuna.samplers.TPESampler(seed=own, n_startup_trials=at_random, constant_liar=True)


def _origin(trial: Trial) -> int:
    number: int = trial.user_attrs[ORIGIN] if RETRY_OF in trial.user_attrs else trial.number
    return number


def _rounded(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Raise Interrupted on SIGINT, SIGTERM and SIGHUP, also between trainings."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(0, number)

    before: dict[int, Any] = {}
    try:
        for wanted in stop_signals():
            before[wanted] = signal.signal(wanted, stop)
    except ValueError:  # only the main thread can set signal handlers
        pass
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
