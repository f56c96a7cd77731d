"""A benchmark as a program that refuses as the command line does: one line, exit code 2."""

import sys
from collections.abc import Callable

from logdepth.errors import UserError


def run(main: Callable[[], None]) -> None:
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
