"""The command line in one of several processes that torchrun started. It imports nothing heavy in any other process.

The first rank prints. Of an error, one line comes from one rank, whichever meets it first.
"""

import io
import os
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

from logdepth.errors import UserError

SHARED_VERBS = ("train", "evaluate")
"""Verbs whose work ranks share."""


class Silenced(io.StringIO):
    """A stream of a rank that is not to print; `behind` it is the stream for an error that this rank must tell."""

    behind = sys.stderr

    def write(self, text: str) -> int:
        return len(text)


def is_one_of_several() -> bool:
    """Whether torchrun started this process beside others. As the only one, it is a process like any other."""
    return "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE", "1") != "1"


def run_as_rank(work: Callable[[], int]) -> NoReturn:
    """Does the work of one rank, and ends the process when all ranks have done theirs."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # before the import: its warnings would come from every rank
    from logdepth.parallel import is_lost_rank, leave, lost_rank

    if os.environ.get("RANK") != "0":
        silenced = Silenced()
        silenced.behind, sys.stdout, sys.stderr = sys.stderr, Silenced(), silenced
    try:
        code = work()
    except SystemExit as stopped:
        code = int(stopped.code or 0)
    except BaseException as error:
        code = 1
        complain(f"logdepth: {lost_rank()}" if is_lost_rank(error) else traceback.format_exc())
    leave(code)
    os._exit(code)


def meet_others(verb: str) -> None:
    """Waits for the other ranks; an error if they cannot share the work of the verb."""
    from logdepth.parallel import joined

    joined()
    if verb not in SHARED_VERBS:
        raise UserError(
            f"this verb runs in one process; start it without torchrun, which is for {' and '.join(SHARED_VERBS)}"
        )


def complain(line: str) -> None:
    """Prints an error on stderr, unless another rank has done so."""
    if is_one_of_several():
        from logdepth.parallel import speaks_for_all

        if not speaks_for_all():
            return
    print(line, file=getattr(sys.stderr, "behind", sys.stderr), flush=True)
