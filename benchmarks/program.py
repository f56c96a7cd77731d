"""Runs a script as a program: user errors are one line with exit code 2, and child processes end with their parent."""

import argparse
import ctypes
import datetime
import re
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import torch

from logdepth.cli.process import discard_output
from logdepth.errors import UserError
from logdepth.training import Interrupted

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
"""The C library, loaded before any process is forked."""
PR_SET_PDEATHSIG = 1
"""Constant from <linux/prctl.h>."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose description is the script's docstring; invalid arguments are one-line errors."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help lists all options")


def run(main: Callable[[], None]) -> None:
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except BrokenPipeError:  # the process that reads stdout has exited, such as `head`
        discard_output()
        sys.exit(141)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(stopped.exit_code)


def at_least(least: int) -> Callable[[str], int]:
    """Return an argparse type for integers that are at least `least`."""

    def whole_number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}; got {text}")
        return int(text)

    return whole_number


def name_of_gpu() -> str:
    """Return the name of the GPU for names of result files: h200 for an NVIDIA H200."""
    name = torch.cuda.get_device_name().lower().removeprefix("nvidia ")
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def exit_when_terminated() -> None:
    """Turn SIGTERM into SystemExit, so that cleanup runs and child processes are ended."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def signal_when_parent_ends(number: int) -> None:
    """Send this process a signal when its parent process ends for any reason. Linux only."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, number)
