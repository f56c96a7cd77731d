"""One worker of a sweep: takes trials, trains them, takes over those of the dead, until the study is done.

Any number of them may run, started by the same command; all that they share is the storage. What a list of trials
means is the ledger's to say.
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
from logdepth.config import difference, flattened, override, to_dict
from logdepth.errors import UserError
from logdepth.progress import Part, Progress, in_words
from logdepth.recipes import recipe
from logdepth.runs import MACHINE_FIELDS, RunConfig, RunFolder, decisive
from logdepth.runs.environment import typed_command
from logdepth.sweep.heartbeat import Heartbeat, Vigil, forget_the_dead, number_alive, signed_in
from logdepth.sweep.ledger import DEATHS, GIVEN_BACK, ORIGIN, OVER, RETRY_OF, SURPLUS, Ledger, retry_of
from logdepth.sweep.outcome import REASON, SECONDS, STEPS, best_of, draw, rows_of, write_tables
from logdepth.sweep.space import Choices, Range, changes, described
from logdepth.sweep.storage import open_storage, readable_storage_errors
from logdepth.sweep.study import TERMS, TEXT, Search, agree, agree_on, open_study
from logdepth.sweep.watch import QuietPart, TrialWatch
from logdepth.training import DivergedError, Interrupted, TrainState, batches_of, checked_and_prepared, resume, train

LOOK_SECONDS = 1.0
"""Between looks at the trials of others."""
DRAW_SECONDS = 60.0
"""Between figures; the tables are written after every trial."""
MOST_DEATHS = 3
"""A trial on which so many workers died is given up: it would take all others with it."""


def work(search: Search) -> dict[str, Any]:
    """Works on a study until it has its trials; returns what sweep.json holds.

    Raises Interrupted, with its trial given back, when a signal asks to stop.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    _check(search)
    prepared = checked_and_prepared(search.config, search.data_dir)
    with readable_storage_errors(search.storage), _signals_raise():
        storage = open_storage(search.storage, search.out / "journal.log")
        study = open_study(search, storage)
        agree(study, search)
        _refuse_trials_of_another_study(search, study)
        agree_on(study, {"the text": prepared.key}, TEXT)
        began_with = study.user_attrs[TERMS]["version"]
        if began_with != logdepth.__version__:
            print(f"this study began with logdepth {began_with}; here it is {logdepth.__version__}", file=sys.stderr)
        with signed_in(search.out / "workers") as name:
            return Worker(search, study, name).run()


def _check(search: Search) -> None:
    if search.trials < 1:
        raise UserError(f"--trials must be at least 1; got {search.trials}")
    if not 0 < search.grace < math.inf:
        raise UserError(f"--grace must be above 0 and finite; got {search.grace}")


def _refuse_trials_of_another_study(search: Search, study: optuna.Study) -> None:
    trials = search.out / "trials"
    if trials.is_dir() and any(trials.iterdir()) and not study.get_trials(deepcopy=False):
        raise UserError(f"{trials} holds trials, the study '{search.study}' has none; choose another --out")


class Worker:
    """One process at work on a study."""

    def __init__(self, search: Search, study: optuna.Study, name: str) -> None:
        self.search, self.study, self.name = search, study, name
        self.vigil = Vigil(search.out / "workers", search.grace)
        self.drawn_at = time.monotonic()
        self.threads = torch.get_num_threads()
        """That a worker alone would take."""
        self.remarks: set[str] = set()
        """Of trainings, said already."""
        self.left_out: str | None = None
        """What of the outcome is missing, and why."""

    def run(self) -> dict[str, Any]:
        limit = self.search.trials
        for trial in self._look().latest(*OVER):
            self._tidy(self._folder(trial.user_attrs.get(ORIGIN, trial.number)))  # a kill may have come before it
        done = self._percent(self._look())
        with Progress("sweep", 100, unit="%", done=done) as self.progress:
            while not (ledger := self._look()).is_over(limit):
                self._rescue(ledger)
                if len(ledger.origins) < limit or self._look().latest(TrialState.WAITING):
                    self._take_one()
                elif self.search.wait:
                    self.progress.update(self._percent(ledger), "waiting for the trials of other workers")
                    time.sleep(LOOK_SECONDS)
                else:
                    break
            self.progress.update(self._percent(self._look()))
        forget_the_dead(self.search.out / "workers")
        return self._write(last=True)

    def _look(self) -> Ledger:
        return Ledger(self.study.get_trials(deepcopy=False))

    def _percent(self, ledger: Ledger) -> float:
        return 100 * min(1, len(ledger.latest(*OVER)) / self.search.trials)

    def _rescue(self, ledger: Ledger) -> None:
        """Fails the trials of the dead, and queues again what failed."""
        for trial in ledger.latest(TrialState.RUNNING):
            if self.vigil.is_dead(trial):
                self._end(trial.number, TrialState.FAIL)
        for trial in self._look().latest(TrialState.FAIL):
            params, attributes = retry_of(trial)
            self.study.enqueue_trial(params, attributes)

    def _take_one(self) -> None:
        """A trial that waits, or a new one."""
        trial = self.study.ask()
        try:
            agree(self.study, self.search)  # two that made the study at the same time may have set others
            dropped = self._look().dropped(trial.number, self.search.trials)
            if dropped is not None:
                trial.set_user_attr(SURPLUS, dropped)
                self._end(trial.number, TrialState.FAIL)
                return
            with Heartbeat(trial, self.name) as heart:
                self._do(trial, heart)
        except UpdateFinishedTrialError:
            self.progress.say(f"trial {_origin(trial)}: another worker has taken it over")
            return
        except BaseException as error:
            expected = isinstance(error, UserError | Interrupted) or not isinstance(error, Exception)
            self._give_back(trial, in_good_order=expected)
            raise
        self._tell_of(_origin(trial))

    def _do(self, trial: Trial, heart: Heartbeat) -> None:
        """Trains a trial, from wherever it stands, and tells the study how it ended."""
        origin = _origin(trial)
        # Every trial has its own seed, so that no two workers ever propose the same.
        self.study.sampler = _sampler(self.search.config.seed, origin, self.search.trials)
        values = {name: _suggest(trial, name, one) for name, one in self.search.space.items()}
        if trial.user_attrs.get(DEATHS, 0) >= MOST_DEATHS:
            self._prune(trial, f"given up: {MOST_DEATHS} workers died on it")
            return
        try:
            config = override(self.search.config, changes(self.search.config, values))
        except UserError as error:  # each field was tried alone; together they may not fit
            self._prune(trial, f"refused: {error}")
            return
        self._share_cores()
        folder = self._folder(origin)
        try:
            state = self._train(config, folder, TrialWatch(trial, heart, folder, self._part(origin)))
        except optuna.TrialPruned:
            self._prune(trial, "worse than the median of the others", folder)
        except DivergedError:
            self._prune(trial, "training diverged", folder)
        except torch.OutOfMemoryError:
            self._prune(trial, "out of memory", folder)
        except RefusedError as error:
            self._prune(trial, f"refused: {error}")
        else:
            self._record(trial, folder)
            self._finish(trial, TrialState.COMPLETE, state.best_loss)
            self._tidy(folder)

    def _share_cores(self) -> None:
        """Workers that each take all cores of a machine are many times slower than one alone."""
        if self.search.config.train.threads is None:
            alive = number_alive(self.search.out / "workers")
            torch.set_num_threads(max(1, self.threads // max(1, alive)))

    def _train(self, config: RunConfig, folder: RunFolder, watch: TrialWatch) -> TrainState:
        if not folder.exists:
            _refuse_what_cannot_train(config, self.search.data_dir)
            return train(config, folder.path, self.search.data_dir, watch)
        if decisive(folder.config()) != decisive(config):
            raise UserError(f"{folder.path} holds a run that is not of this study; choose another --out")
        return resume(folder.path, self.search.data_dir, watch)

    def _prune(self, trial: Trial, reason: str, folder: RunFolder | None = None) -> None:
        trial.set_user_attr(REASON, reason)
        if folder is not None:
            self._record(trial, folder)
        self._finish(trial, TrialState.PRUNED)
        if folder is not None:
            self._tidy(folder)

    def _record(self, trial: Trial, folder: RunFolder) -> None:
        """What the trial took, over all its attempts."""
        lines = folder.read_metrics() or [{"step": 0, "seconds": 0.0}]
        trial.set_user_attr(STEPS, max(line["step"] for line in lines))
        trial.set_user_attr(SECONDS, max(line["seconds"] for line in lines))

    def _finish(self, trial: Trial, state: TrialState, loss: float | None = None) -> None:
        """Tells the study; what another worker has taken over is not ours to end."""
        if not self._end(trial.number, state, loss):
            raise UpdateFinishedTrialError

    def _end(self, number: int, state: TrialState, loss: float | None = None) -> bool:
        """Ends a running trial; only one worker succeeds."""
        try:
            self.study.tell(number, loss, state)
        except (ValueError, UpdateFinishedTrialError):  # it was over already
            return False
        return True

    def _give_back(self, trial: Trial, *, in_good_order: bool) -> None:
        """Puts a trial that this worker cannot end back into the queue; where that fails, others find it."""
        with contextlib.suppress(Exception):
            if in_good_order:
                trial.set_user_attr(GIVEN_BACK, True)
            if self._end(trial.number, TrialState.FAIL):
                self._rescue(self._look())

    def _folder(self, origin: int) -> RunFolder:
        return RunFolder(self.search.out / "trials" / f"{origin:04d}")

    def _part(self, origin: int) -> Callable[[int], Part]:
        """Where a trial tells how far it is, from its number of steps on."""
        share = 100 / self.search.trials
        return lambda steps: QuietPart(self.progress, f"trial {origin}", steps, share, self.remarks)

    def _tidy(self, folder: RunFolder) -> None:
        """Removes what only a run that goes on needs."""
        for file in (folder.checkpoint, folder.weights("best"), folder.weights("last"), folder.path / "lock"):
            file.unlink(missing_ok=True)

    def _tell_of(self, origin: int) -> None:
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
        soon = f"; {left} to go, about {in_words(seconds)}" if left else "; all trials done"
        self.progress.say(f"trial {origin}: {how}; {params}{so_far}{soon}")
        self.progress.update(percent)

    def _write(self, *, last: bool = False) -> dict[str, Any]:
        """The outcome so far, as sweep.json has it."""
        search = self.search
        with alone(search.out):  # around looking and writing: no worker writes over what another knew better
            rows = rows_of(self._look(), search.trials)
            best = best_of(rows)
            best_config = None if best is None else changes_of_best(search, best["params"])
            record = {
                "recipe": search.recipe,
                "study": search.study,
                "version": logdepth.__version__,
                "space": described(search.space),
                "config": to_dict(search.config),
                "best": best,
                "best_config": best_config,
                "command": typed_command(),
                "trials": rows,
            }
            write_tables(search.out, record)
            if last or time.monotonic() - self.drawn_at > DRAW_SECONDS:
                self.left_out = draw(search.out, rows, self.study)
                self.drawn_at = time.monotonic()
        if last and self.left_out:
            self.progress.say(self.left_out)
        return record


def changes_of_best(search: Search, params: dict[str, Any]) -> dict[str, Any]:
    """What to change in the recipe to train a trial again, the sweep's own flags included."""
    asked = flattened(difference(to_dict(recipe(search.recipe)), to_dict(search.config)))
    left_out = MACHINE_FIELDS - {"data.paths"} | {"seed"}
    fields = {name: value for name, value in asked.items() if name not in left_out}
    return changes(search.config, fields | flattened(changes(search.config, params)))


class RefusedError(Exception):
    """A point of the space that cannot be trained, whoever tries."""


def _refuse_what_cannot_train(config: RunConfig, data_dir: Path | None) -> None:
    """Tells a bad point from a bad machine: what is refused here is refused everywhere."""
    store = checked_and_prepared(config, data_dir).stores["train"]
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
    """TPE, after a third of the trials at random: four at least, ten at most."""
    own = int(np.random.SeedSequence([seed, origin]).generate_state(1)[0])
    at_random = max(4, min(10, trials // 3))
    # A constant liar keeps away from what others are trying.
    return optuna.samplers.TPESampler(seed=own, n_startup_trials=at_random, constant_liar=True)


def _origin(trial: Trial) -> int:
    number: int = trial.user_attrs[ORIGIN] if RETRY_OF in trial.user_attrs else trial.number
    return number


def _rounded(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Between trainings, too, SIGINT and SIGTERM end the work in good order."""

    def stop(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(0, number)

    before: dict[int, Any] = {}
    try:
        for wanted in (signal.SIGINT, signal.SIGTERM):
            before[wanted] = signal.signal(wanted, stop)
    except ValueError:  # not in the main thread: signals go elsewhere
        pass
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
