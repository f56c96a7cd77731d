"""`python -m logdepth` is `logdepth`."""

import sys

from logdepth.cli import main

if __name__ == "__main__":
    sys.exit(main())
