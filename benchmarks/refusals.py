"""A script as a program that ends as the command line does: a mistake is one line and exit code 2."""

import sys
from collections.abc import Callable

from logdepth.errors import UserError


def run(main: Callable[[], None]) -> None:
    try:
        main()
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
