"""Result files of tasks: one JSON file per run, with a checksum. Tables and figures are made from these files only."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from logdepth.atomic import read_json, write_json
from logdepth.checksums import seal, unseal
from logdepth.config import flattened, from_dict, to_dict
from logdepth.errors import UserError
from logdepth.solving.accuracy import Accuracy, beyond
from logdepth.solving.config import MACHINE_FIELDS
from logdepth.tasks import Case, task_named

VERSION = 1
REMEDY = "remove it and run the `logdepth reproduce` command that made it again"
MAY_DIFFER = MACHINE_FIELDS | {"seed"}
"""Fields of a config that may differ between the seeds of a model."""
SOLVED = 0.999
"""Score from which a run counts as having solved its task."""


@dataclass(frozen=True, kw_only=True)
class TaskResult:
    """What one run on a task measured."""

    version: int = VERSION
    """Version of the format."""
    solver: str
    """Name of the model in SOLVERS."""
    config: dict[str, Any]
    """The config of the run: a TaskRunConfig as JSON."""
    parameters: int
    """Number of parameters of the model."""
    steps: int
    """Number of training steps."""
    finished: str
    """Why training ended."""
    seconds: float = 0.0
    """Time spent in training, checks included."""
    curve: tuple[tuple[float, ...], ...]
    """Per check: step, training loss and accuracy, number of training cases, lowest accuracy beyond training."""
    test: tuple[Accuracy, ...]
    """Right answers in each test case."""
    environment: dict[str, Any] = field(default_factory=dict)
    """Versions and device."""
    command: str = ""
    """The command that made the file."""

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"version {self.version} cannot be read, only {VERSION}")
        if self.parameters < 1 or self.steps < 1 or not self.test:
            raise ValueError("parameters and steps must be at least 1, and there must be a test")
        if not 0 <= self.seconds < math.inf:
            raise ValueError(f"seconds must not be negative; got {self.seconds}")
        if any(len(point) != 5 or not all(map(math.isfinite, point)) for point in self.curve):
            raise ValueError("each point of curve must be five finite numbers")
        if not {"task", "seed"} <= self.config.keys():
            raise ValueError("config must have a task and a seed")
        known = set(task_named(self.task).test_cases)
        if {one.case for one in self.test} - known or len({one.case for one in self.test}) < len(self.test):
            raise ValueError(f"test must be different test cases of {self.task}")

    @property
    def task(self) -> str:
        return str(self.config["task"])

    @property
    def seed(self) -> int:
        return int(self.config["seed"])

    @property
    def name(self) -> str:
        return f"{self.task}-{self.solver}-{self.seed}"

    @property
    def cases(self) -> set[Case]:
        """The test cases."""
        return {one.case for one in self.test}

    @property
    def score(self) -> float:
        """Mean accuracy over the test cases that are longer, or have more items, than all of training."""
        return self.score_over(self.cases)

    def score_over(self, cases: Iterable[Case]) -> float:
        """The score over some of the test cases."""
        chosen = set(beyond(task_named(self.task), list(cases)))
        found = [one.accuracy for one in self.test if one.case in chosen]
        return sum(found) / len(found) if found else math.nan

    @property
    def is_solved(self) -> bool:
        return self.score >= SOLVED


def percent(share: float, digits: int = 2) -> str:
    """A share in per cent that is never rounded up to 100."""
    if not math.isfinite(share):
        return "–"
    return "100" if share == 1 else f"{math.floor(10 ** (digits + 2) * share) / 10**digits:.{digits}f}"


def write_task_result(folder: Path, result: TaskResult) -> Path:
    """Write a result file into a folder; return its path."""
    path = folder / f"{result.name}.json"
    write_json(path, seal(to_dict(result)))
    return path


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """Read the fields of a JSON file with a checksum. The message of any damage ends with the remedy."""
    try:
        saved = read_json(path)
    except UserError as error:
        raise UserError(f"{error}; {remedy}") from None
    if not isinstance(saved, dict):
        raise UserError(f"{path} is damaged: it holds no fields; {remedy}")
    try:
        return unseal(saved, path, remedy, required=True)
    except RecursionError:
        raise UserError(f"{path} is damaged (its brackets are nested too deeply); {remedy}") from None


def read_task_result(path: Path) -> TaskResult:
    """Read a result file. Raise a UserError if it is damaged, edited or named for another run."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a file; move it to another folder")
    saved = read_sealed(path, REMEDY)
    if "solver" not in saved:
        raise UserError(f"{path} is not a result file of a task; move it to another folder")
    result = from_dict(TaskResult, saved, str(path))
    if path.stem != result.name:
        raise UserError(f"{path} holds the result of {result.name}; give it that name")
    return result


def read_task_results(folder: Path) -> list[TaskResult]:
    """Read all result files in a folder. Raise a UserError if two seeds of a model on a task have other settings."""
    results = {path: read_task_result(path) for path in sorted(folder.glob("*.json"))}
    refuse_mixed_settings({str(path): (one.solver, one.config) for path, one in results.items()})
    return list(results.values())


def refuse_mixed_settings(runs: Mapping[str, tuple[str, Mapping[str, Any]]]) -> None:
    """Raise a UserError if runs of a model on a task have different settings, so that no median is possible.

    `runs` maps the name of each run to its model and its config as JSON.
    """
    firsts: dict[tuple[str, str], tuple[str, dict[str, Any]]] = {}
    for where, (solver, config) in runs.items():
        mine = {name: value for name, value in flattened(dict(config)).items() if name not in MAY_DIFFER}
        first, theirs = firsts.setdefault((str(config["task"]), solver), (where, mine))
        for name in sorted(mine.keys() | theirs.keys()):
            if mine.get(name) != theirs.get(name):
                raise UserError(
                    f"{where} has {name} {mine.get(name)!r}, and {first} has {theirs.get(name)!r}: they are not seeds "
                    "of the same model; use the same settings, or keep them in different folders"
                )


def holds_task_results(folder: Path) -> bool:
    """Whether the first result file in a folder that can be read is one of a task. What cannot, its reader refuses."""
    for path in sorted(folder.glob("*.json")):
        try:
            saved = read_json(path) if path.is_file() else None
        except UserError:
            continue
        if saved is not None:
            return isinstance(saved, dict) and "solver" in saved
    return False
