"""Who is alive: workers sign in, and every running trial has a pulse. It knows nothing of what a trial does.

On one machine the kernel tells at once: a worker holds a lock on a file as long as it lives. From another machine only
the pulse is seen, a number that grows; one that stands still for a grace period, by the watcher's own clock, is over.
"""

import contextlib
import fcntl
import platform
import secrets
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import optuna
from optuna.trial import FrozenTrial, Trial

from logdepth.atomic import readable_disk_errors

BEAT_SECONDS = 5.0
BEAT, WORKER = "beat", "worker"
"""Attributes of a running trial: its pulse; the machine and the name of its worker."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def this_machine() -> str:
    """The same for processes under one kernel, which sees the locks of all of them."""
    if BOOT_ID.is_file():
        return BOOT_ID.read_text().strip()
    return f"{platform.node()}-{uuid.getnode():x}"


@contextlib.contextmanager
def signed_in(workers: Path) -> Iterator[str]:
    """A name for this worker, with a file of that name that is locked while the block runs.

    After an error the file stays: a trial may still name the worker, and the lock that is gone tells that it ended.
    """
    name = secrets.token_hex(8)
    with readable_disk_errors(workers):
        workers.mkdir(parents=True, exist_ok=True)
        file = (workers / name).open("w")
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield name
        (workers / name).unlink(missing_ok=True)


def lives(workers: Path, name: str) -> bool | None:
    """Whether a worker of this machine is alive; None where it did not sign in here."""
    try:
        file = (workers / name).open()
    except OSError:
        return None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def number_alive(workers: Path) -> int:
    """Workers at work on this machine, this one included."""
    return sum(lives(workers, file.name) is True for file in workers.iterdir())


def forget_the_dead(workers: Path) -> None:
    for file in workers.iterdir():
        if lives(workers, file.name) is False:
            file.unlink(missing_ok=True)


class Vigil:
    """Watches trials of others."""

    def __init__(self, workers: Path, grace: float) -> None:
        self._workers, self._grace, self._machine = workers, grace, this_machine()
        self._seen: dict[int, tuple[int | None, float]] = {}

    def is_dead(self, trial: FrozenTrial) -> bool:
        """Whether nobody is behind a running trial any more."""
        attributes, now = trial.user_attrs, time.monotonic()
        machine, name = attributes.get(WORKER, (None, None))
        alive = lives(self._workers, name) if machine == self._machine else None
        if alive is not None:
            return not alive
        beat = attributes.get(BEAT)
        before, since = self._seen.setdefault(trial.number, (beat, now))
        if before != beat:
            self._seen[trial.number] = (beat, now)
            return False
        return now - since > self._grace


class Heartbeat:
    """The pulse of a trial while the block runs, from a thread of its own."""

    def __init__(self, trial: Trial, worker: str) -> None:
        self._trial, self._stop = trial, threading.Event()
        self.lost = False
        """Whether another worker has declared the trial dead."""
        trial.set_user_attr(WORKER, (this_machine(), worker))
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(BEAT_SECONDS):
            count += 1
            try:
                self._trial.set_user_attr(BEAT, count)
            except optuna.exceptions.UpdateFinishedTrialError:
                self.lost = True
                return
            except Exception:  # a database may be away for a while; the next beat may reach it
                continue
