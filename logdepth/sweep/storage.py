"""The storage of a study: a journal file or a database.

The journal is locked with flock instead of Optuna's lock files, because the kernel releases a killed process's lock.
A line that a kill left incomplete is removed before the next line is written.
"""

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, OperationalError, SQLAlchemyError

from logdepth.atomic import readable_disk_errors
from logdepth.checksums import mismatch, seal, unseal
from logdepth.errors import UserError

CONNECT_SECONDS = 10
SQLITE_SECONDS = 60
"""Maximum seconds that a writer waits for others, because SQLite allows one writer at a time."""
ATTEMPTS = 5
JOURNAL_REMEDY = "restore it from a copy, or start another sweep with another --out"


def open_storage(url: str | None, journal: Path) -> BaseStorage:
    """Open the database at `url`, or the journal file if `url` is None."""
    if url is None:
        with readable_disk_errors(journal):
            journal.parent.mkdir(parents=True, exist_ok=True)
            return JournalStorage(_Journal(str(journal), _JournalLock(journal)))
    with readable_storage_errors(url):
        try:
            return _open_database(url)
        except ImportError:
            raise UserError(f"the driver of {without_password(url)} is not installed; install it with pip") from None
        except RuntimeError as error:  # the tables were created by another version of Optuna
            raise UserError(f"{without_password(url)}: {' '.join(str(error).split())}") from None


def without_password(url: str) -> str:
    """Return a database URL without its password, for messages and records."""
    try:
        return sqlalchemy.engine.make_url(url).set(query={}).render_as_string(hide_password=True)
    except (ArgumentError, ValueError):
        return "…"


@contextlib.contextmanager
def readable_storage_errors(url: str | None) -> Iterator[None]:
    """Convert storage errors into a UserError of one line that contains no password."""
    try:
        yield
    except (optuna.exceptions.StorageInternalError, SQLAlchemyError) as error:
        shown = "the study's journal" if url is None else f"the database {without_password(url)}"
        raise UserError(
            f"{shown} cannot be used ({_reason(error)}); check --storage and run the same command again"
        ) from None


def _reason(error: BaseException) -> str:
    if isinstance(error, ArgumentError | NoSuchModuleError):
        return "not a database URL, such as sqlite:///FILE or postgresql+psycopg2://USER@HOST/NAME"
    inner = getattr(error, "orig", None) or error.__cause__
    return _reason(inner) if inner is not None else " ".join(str(error).split())


def _open_database(url: str) -> BaseStorage:
    settings: dict[str, Any] = {"pool_pre_ping": True}  # a connection may have closed during a long trial
    kind = sqlalchemy.engine.make_url(url).get_backend_name()
    if kind == "postgresql":
        settings["connect_args"] = {"connect_timeout": CONNECT_SECONDS}
    if kind == "sqlite":
        settings["connect_args"] = {"timeout": SQLITE_SECONDS}
    for attempt in range(ATTEMPTS):
        try:
            storage = RDBStorage(url, engine_kwargs=settings)
            break
        except SQLAlchemyError as error:  # another worker may be creating the same tables
            unreachable = isinstance(error, OperationalError) and (kind != "sqlite" or "unable to open" in str(error))
            if unreachable or isinstance(error, ArgumentError) or attempt == ATTEMPTS - 1:
                raise
        time.sleep(0.2 * (attempt + 1))
    if kind == "sqlite":
        _serialize_transactions(storage.engine)
    return storage


def _serialize_transactions(engine: sqlalchemy.Engine) -> None:
    """Make SQLite lock the database when a transaction begins.

    By default it locks at the first write, so that two workers could both read a trial as free.
    """

    @sqlalchemy.event.listens_for(engine, "connect")
    def disable_implicit_transactions(connection: Any, _record: Any) -> None:
        connection.isolation_level = None

    @sqlalchemy.event.listens_for(engine, "begin")
    def begin(connection: sqlalchemy.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    engine.dispose()  # closes the connections opened before


class _Journal(JournalFileBackend):
    """Optuna's journal file with a checksum in each line, and with readable errors.

    Lines of older versions have no checksums. Optuna ignores the additional field.
    """

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with readable_disk_errors(Path(self._file_path)):
            super().append_logs([seal(log) for log in logs])

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        number = max(known for known in self._log_number_offset if known <= log_number_from)
        offset = self._log_number_offset[number]
        with Path(self._file_path).open("rb") as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):  # another worker is writing it, or was killed while it did
                    return
                if number >= log_number_from:
                    yield self._log_in(line)
                number, offset = number + 1, offset + len(line)
                self._log_number_offset[number] = offset

    def _log_in(self, line: bytes) -> dict[str, Any]:
        path = Path(self._file_path)
        try:
            log = json.loads(line)
        except (ValueError, RecursionError):
            log = None
        if not isinstance(log, dict) or "op_code" not in log:
            raise mismatch(path, JOURNAL_REMEDY)
        return unseal(log, path, JOURNAL_REMEDY)


class _JournalLock(JournalFileOpenLock):
    """A lock held by one thread of one process while it appends to the journal."""

    def __init__(self, journal: Path) -> None:
        super().__init__(str(journal))
        self._journal, self._descriptor = journal, -1

    def acquire(self) -> bool:
        descriptor = os.open(self._journal, os.O_RDWR | os.O_CREAT, 0o644)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        self._descriptor = descriptor
        _remove_incomplete_line(descriptor)
        return True

    def release(self) -> None:
        os.close(self._descriptor)


def _remove_incomplete_line(descriptor: int) -> None:
    size = os.fstat(descriptor).st_size
    end = size
    while end and os.pread(descriptor, 1, end - 1) != b"\n":
        end -= 1
    if end < size:
        os.ftruncate(descriptor, end)
