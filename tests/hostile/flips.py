"""Flip bytes and bits in the files of runs, the cache, a study and a sweep, and run every verb that reads them.

    python -m tests.hostile.flips --count 500 --seed 1
    python -m tests.hostile.flips --only 137 --keep /tmp/flips      # one case, on the project that is there

A case draws a file, then a byte of it, and replaces the byte by another or flips one of its bits. All pure outputs
(tables, figures, pages) count as one file. Case 0 damages nothing, and comes first. With --keep, the project is built
only once, so that a number means the same byte each time.
"""

import contextlib
import random
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.hostile.outcomes import HARMLESS, Case, numbers_of, parser, run_cases
from tests.hostile.project import CHECKS, Project
from tests.hostile.worker import Worker


class Flips:
    """The flips of a seed in a project."""

    def __init__(self, project: Project, seed: int) -> None:
        self.project, self.seed = project, seed

    def one(self, number: int, few: bool = False) -> Case:
        """Run a case with all checks that read the file, or only with a quick one."""
        project, chance = self.project, random.Random(f"flips {self.seed} {number}")
        if not number:
            return project.after_all("nothing", list(CHECKS), lambda _: None, [])
        name = chance.choice([*project.files, None]) or chance.choice(project.outputs)
        data = bytearray((project.pristine / name).read_bytes())
        place = chance.randrange(len(data))
        before = data[place]
        data[place] ^= 1 << chance.randrange(8) if chance.random() < 0.5 else chance.randrange(1, 256)
        what = f"{name}, byte {place} of {len(data)}: {before:#04x} → {data[place]:#04x}"
        checks = project.checks_of(name, few)
        if not checks:
            return Case(what, HARMLESS, "nothing reads it")
        return project.after_all(what, checks, lambda world: _write(world / name, bytes(data)), [name])


def _write(file: Path, data: bytes) -> None:
    file.write_bytes(data)


@contextlib.contextmanager
def project_in(folder: Path | None) -> Iterator[Project]:
    """A project in a folder that is kept, or in a temporary one."""
    with contextlib.ExitStack() as stack:
        base = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="logdepth-hostile-")))
        yield Project(base, stack.enter_context(Worker()))


def main() -> int:
    arguments = parser(__doc__, count=500).parse_args()
    with project_in(arguments.keep) as project:
        numbers = arguments.only or [0, *numbers_of(arguments)]
        return run_cases("flips", numbers, Flips(project, arguments.seed).one, arguments)


if __name__ == "__main__":
    sys.exit(main())
