"""A script as a program: a mistake is one line and exit code 2, as on the command line; and it ends with its parent."""

import argparse
import ctypes
import datetime
import re
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import torch

from logdepth.errors import UserError
from logdepth.train import Interrupted

LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None
"""Loaded before any process is forked."""
PR_SET_PDEATHSIG = 1
"""Of <linux/prctl.h>."""


class Parser(argparse.ArgumentParser):
    """Of a script whose docstring is its help; what it cannot read is one line too."""

    def __init__(self, description: str | None) -> None:
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; --help has all options")


def run(main: Callable[[], None]) -> None:
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
    except Interrupted as stopped:
        print(stopped, file=sys.stderr)
        sys.exit(stopped.exit_code)


def at_least(least: int) -> Callable[[str], int]:
    """The type of an argument."""

    def whole_number(text: str) -> int:
        if int(text) < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}; got {text}")
        return int(text)

    return whole_number


def name_of_gpu() -> str:
    """NVIDIA H200 → h200: of files of its results."""
    name = torch.cuda.get_device_name().lower().removeprefix("nvidia ")
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def today() -> str:
    return datetime.datetime.now(datetime.UTC).date().isoformat()


def exit_when_terminated() -> None:
    """So that what is to be undone or ended at the end is, processes of this one among it."""
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def signal_when_parent_ends(number: int) -> None:
    """From now on this process gets a signal when the one that started it ends, in whatever way. On Linux alone."""
    if LIBC is not None:
        LIBC.prctl(PR_SET_PDEATHSIG, number)
