"""Atomic writes: a file is written under a temporary name in its folder, synced to disk, then renamed."""

import contextlib
import errno
import fcntl
import glob
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from logdepth.errors import UserError

DISK_FULL_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
PATH_ERRORS = {
    errno.EACCES,
    errno.EROFS,
    errno.EPERM,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENAMETOOLONG,
    errno.ELOOP,
}
ABANDONED_SECONDS = 60
"""Minimum age in seconds at which what a killed process left under a temporary name counts as abandoned."""
PARTIAL = ".partial-"
"""Prefix of temporary names. Nothing that is read has such a name."""


class NoSpaceError(UserError):
    """A file could not be written because the disk is full."""

    def __init__(self, path: Path, reason: str, then: str = "run the same command again") -> None:
        super().__init__(f"cannot write {path}: {reason}; free some space, then {then}")
        self.path, self.reason = path, reason


@contextlib.contextmanager
def replacing(path: Path, *, in_folder: bool = False) -> Iterator[Path]:
    """Yield a temporary path. When the block succeeds, it is renamed to `path`; when it fails, it is removed.

    Args:
        path: the file to write.
        in_folder: whether the temporary path is in a temporary folder of its own. It is for writers that make
            temporary files themselves: if the process is killed, these are left in that folder too.
    """
    with readable_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f"{PARTIAL}*-{glob.escape(path.name)}"):
            _remove_if_abandoned(left)
        temporary = path.with_name(f"{PARTIAL}{os.getpid()}-{path.name}")
        partial = temporary
        if in_folder:
            temporary.mkdir(exist_ok=True)
            partial = temporary / path.name
        try:
            yield partial
            _sync(partial)
            partial.replace(path)
            _sync(path.parent)
        finally:
            remove_partial(temporary)


def remove_partial(path: Path) -> None:
    """Remove a temporary file or folder, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder. When the block succeeds, it is renamed to `path`, unless that already exists."""
    with readable_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        partial = Path(tempfile.mkdtemp(prefix=PARTIAL, dir=path.parent))
        lock = os.open(partial, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it however the process ends
        try:
            yield partial
            for file in partial.iterdir():
                _sync(file)
            partial.chmod(0o755)  # mkdtemp creates folders that only their owner can read
            _sync(partial)
            if path.exists() and not path.is_dir():
                raise UserError(f"cannot write {path}: it exists and is not a folder; move it to another folder")
            try:
                partial.rename(path)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            _sync(path.parent)
        finally:
            os.close(lock)
            shutil.rmtree(partial, ignore_errors=True)


def _remove_if_abandoned(partial: Path) -> None:
    """Remove what `replacing` left in a killed process, whose id is in the name.

    Its age counts too: the process may run on another machine that shares the file system.
    """
    process = partial.name.removeprefix(PARTIAL).partition("-")[0]
    with contextlib.suppress(OSError):
        is_old = time.time() - partial.stat().st_mtime > ABANDONED_SECONDS
        if is_old and process.isdigit() and not _is_running(int(process)):
            remove_partial(partial)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _remove_abandoned(folder: Path) -> None:
    """Remove the temporary folders of killed processes, which no process has locked."""
    for partial in folder.glob(f"{PARTIAL}*/"):
        with contextlib.suppress(OSError):
            if time.time() - partial.stat().st_mtime < ABANDONED_SECONDS:
                continue  # its owner may not have locked it yet
            lock = os.open(partial, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(partial, ignore_errors=True)
            finally:
                os.close(lock)


@contextlib.contextmanager
def alone(folder: Path, refusal: str | None = None) -> Iterator[None]:
    """Hold a folder's lock during the block, so that only one process at a time is inside.

    If another process holds the lock, raise a UserError with the message `refusal`; without one, wait. The kernel
    releases the lock however the process ends.
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
    """Write a UTF-8 text file atomically."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write an indented JSON file atomically."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    # A file name that is not UTF-8 has surrogates, which JSON can only hold as escapes.
    write_text(path, text.encode("utf-8", "backslashreplace").decode())


def read_json(path: Path) -> Any:
    """Read a JSON file. Raise a UserError that names the file if it is missing, unreadable or not JSON."""
    try:
        if path.exists() and not (
            path.is_file() or path.is_dir()
        ):  # a named pipe that nobody writes to would be waited for forever
            raise UserError(f"{path} is not a regular file; save its content in one")
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:  # not UTF-8, or a NUL in the path
        raise UserError(f"{path} is not readable JSON ({error})") from None
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not readable JSON ({error})") from None
    except RecursionError:
        raise UserError(f"{path} is not readable JSON (its brackets are nested too deeply)") from None
    except ValueError:
        raise UserError(f"{path} is not readable JSON (a number has too many digits)") from None


@contextlib.contextmanager
def readable_disk_errors(path: Path) -> Iterator[None]:
    """Convert a full disk and missing permissions into a UserError of one line that names the file."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL_ERRORS:
            raise NoSpaceError(path, "no space left") from error
        if error.errno in PATH_ERRORS:
            raise UserError(f"cannot write {path}: {error.strerror}; choose another folder") from error
        raise


def _sync(path: Path) -> None:
    """Flush a file or a folder's entries to disk, so that a rename never becomes durable before the content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
