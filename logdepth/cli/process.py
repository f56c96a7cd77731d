"""The process around a verb: its standard streams and its interrupts. It imports nothing heavy."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, TextIO


class Messages:
    """A stream for messages whose failures are ignored: a full disk under a log file must not stop a training run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with _ignored_failures():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with _ignored_failures():
            self._stream.flush()


@contextlib.contextmanager
def _ignored_failures() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:  # as for stdout, the program ends when nobody reads it any more
        raise
    except OSError:
        pass


def prepare_streams() -> None:
    """Make the standard streams of this process safe to use, whatever the shell has connected them to."""
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)  # otherwise the first file that is opened would become stdin
    if sys.stdout is None:
        sys.stdout = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w", encoding="utf-8")
    streams: tuple[Any, Any] = (sys.stdout, sys.stderr)
    for stream in streams:
        stream.reconfigure(errors="backslashreplace")
    sys.stderr = Messages(sys.stderr)


def discard_output() -> None:
    """Drop what is still buffered for stdout and stderr, so that it does not fail again when the interpreter exits."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def exit_on_interrupt() -> None:
    """Make an interrupt end this process at once with one line: libraries may swallow an exception on import."""
    _replace_handler(signal.default_int_handler, _exit)


def raise_on_interrupt() -> None:
    """Make an interrupt an exception again, so that temporary files are removed."""
    _replace_handler(_exit, signal.default_int_handler)


def end_on_interrupt() -> None:
    """Make an interrupt end this process without a word, because all has been said."""
    _replace_handler(signal.default_int_handler, signal.SIG_DFL)
    _replace_handler(_exit, signal.SIG_DFL)


def _replace_handler(expected: Any, handler: Any) -> None:
    if signal.getsignal(signal.SIGINT) is expected:  # another may be there, or none, as in background jobs
        signal.signal(signal.SIGINT, handler)


def _exit(_number: int, _frame: FrameType | None) -> None:
    with contextlib.suppress(OSError):
        os.write(2, b"logdepth: interrupted\n")
    os._exit(130)
