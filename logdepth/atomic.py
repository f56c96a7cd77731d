"""Files that are there whole or not at all: written beside their place under another name, synced, then renamed."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from logdepth.errors import UserError

NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
NOT_HERE = {
    errno.EACCES,
    errno.EROFS,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENAMETOOLONG,
}
ABANDONED_SECONDS = 60
PARTIAL = ".partial-"
"""How the names begin of what is still being written; nothing that loads ever has such a name."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write to, which becomes `path` when the block ends well and is removed when it does not."""
    with readable_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{PARTIAL}{os.getpid()}-{path.name}")
        try:
            yield partial
            _sync(partial)
            partial.replace(path)
            _sync(path.parent)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `path` when the block ends well. Where another was first, its own stays."""
    with readable_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=path.parent))
        lock = os.open(partial, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)  # it goes with the process, however that ends
        try:
            yield partial
            for file in partial.iterdir():
                _sync(file)
            partial.chmod(0o755)  # mkdtemp makes folders that only their owner can read
            _sync(partial)
            if path.exists() and not path.is_dir():
                raise UserError(f"cannot write {path}: something that is not a folder is in its place; move it away")
            try:
                partial.rename(path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            _sync(path.parent)
        finally:
            os.close(lock)
            shutil.rmtree(partial, ignore_errors=True)


def _remove_abandoned(folder: Path) -> None:
    """Removes what killed processes left: partial folders that nobody holds."""
    for partial in folder.glob(f"{PARTIAL}*/"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime < ABANDONED_SECONDS:
                continue  # its owner may not have come to locking it yet
            lock = os.open(partial, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(partial, ignore_errors=True)
            finally:
                os.close(lock)


@contextlib.contextmanager
def alone(folder: Path, refusal: str | None = None) -> Iterator[None]:
    """Only one process at a time in a folder; others are refused, or wait where there is no refusal.

    The lock goes with the process, however it ends.
    """
    with readable_disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / "lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (0 if refusal is None else fcntl.LOCK_NB))
        except BlockingIOError:
            raise UserError(str(refusal)) from None
        yield


def write_text(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path} is not there") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not readable JSON ({error})") from None


@contextlib.contextmanager
def readable_disk_errors(path: Path) -> Iterator[None]:
    """Turns a full disk and missing rights into one line that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise UserError(f"no room left to write {path}: free some space and run the same command again") from error
        if error.errno in NOT_HERE:
            raise UserError(f"cannot write {path}: {error.strerror}; choose another place") from error
        raise


def _sync(path: Path) -> None:
    """Asks the system to put a file or a folder's entries on disk, so that a rename never outlives its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
