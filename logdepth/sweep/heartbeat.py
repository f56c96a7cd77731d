"""Liveness of workers: each worker registers itself, and each running trial has a heartbeat.

On the same machine, a file lock shows at once whether a worker is alive: the worker holds it for its lifetime, and the
kernel releases it. On other machines only the heartbeat counter is visible. A worker whose counter does not change for
a grace period, measured with the observer's clock, counts as dead.
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
"""User attributes of a running trial: its heartbeat counter, and its worker as [machine, name]."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_id() -> str:
    """Return an id of this machine. Processes with the same id run under one kernel and see each other's file locks."""
    if BOOT_ID.is_file():
        return BOOT_ID.read_text().strip()
    return f"{platform.node()}-{uuid.getnode():x}"


@contextlib.contextmanager
def registered_worker(workers: Path) -> Iterator[str]:
    """Register this process as a worker: yield its name and hold a lock on the file of that name during the block.

    After an error the file remains, because a trial may still name the worker; the released lock shows that it ended.
    """
    name = secrets.token_hex(8)
    with readable_disk_errors(workers):
        workers.mkdir(parents=True, exist_ok=True)
    with _locked_file(workers / name):
        yield name
        (workers / name).unlink(missing_ok=True)


@contextlib.contextmanager
def _locked_file(path: Path) -> Iterator[None]:
    """Create a file and hold its lock. Until it is locked, another worker may remove it as that of a dead worker."""
    while True:
        with readable_disk_errors(path):
            file = path.open("w")
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if path.exists():
                yield
                return


def is_alive(workers: Path, name: str) -> bool | None:
    """Return whether a worker of this machine is alive; None if no worker of that name is registered."""
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


def count_alive(workers: Path) -> int:
    """Return the number of live workers on this machine, including this one."""
    return sum(is_alive(workers, file.name) is True for file in workers.iterdir())


def prune_dead_workers(workers: Path) -> None:
    """Remove the files of dead workers."""
    for file in workers.iterdir():
        with contextlib.suppress(OSError), file.open() as opened:  # it is locked if its worker is alive
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
            file.unlink()


class LivenessMonitor:
    """Detects running trials whose worker has died."""

    def __init__(self, workers: Path, grace: float, *, all_register: bool = False) -> None:
        """Create a monitor.

        Args:
            workers: the folder where workers register.
            grace: seconds without a heartbeat after which a worker that cannot be seen counts as dead.
            all_register: whether all workers of the study register in this folder. Then a worker of this machine that
                is not registered has ended. Workers that share a database may have different folders.
        """
        self._workers, self._grace, self._machine = workers, grace, machine_id()
        self._all_register = all_register
        self._seen: dict[int, tuple[int | None, float]] = {}

    def is_dead(self, trial: FrozenTrial) -> bool:
        """Return whether the worker of a running trial is dead."""
        attributes, now = trial.user_attrs, time.monotonic()
        machine, name = attributes.get(WORKER, (None, None))
        if machine == self._machine:
            alive = is_alive(self._workers, name)
            if alive is not None or self._all_register:
                return not alive
        beat = attributes.get(BEAT)
        before, since = self._seen.setdefault(trial.number, (beat, now))
        if before != beat:
            self._seen[trial.number] = (beat, now)
            return False
        return now - since > self._grace


class Heartbeat:
    """A context manager that increments a trial's heartbeat counter from a background thread."""

    def __init__(self, trial: Trial, worker: str) -> None:
        self._trial, self._stop = trial, threading.Event()
        self.lost = False
        """Whether another worker has taken the trial over."""
        trial.set_user_attr(WORKER, (machine_id(), worker))
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
            except Exception:  # the database may be unreachable for a while; retry at the next beat
                continue
