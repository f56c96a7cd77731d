"""Reads everything in results/ (studies, sweeps, associativity, tasks) and names the studies."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from logdepth.associativity import Associativity
from logdepth.atomic import read_json
from logdepth.checksums import unseal
from logdepth.errors import UserError
from logdepth.report.content import in_order
from logdepth.results import Results, read_results
from logdepth.solving import TaskResult, read_task_results

STUDIES = {
    "wikitext2": "WikiText-2, paper's settings",
    "wikitext2-tuned": "WikiText-2, tuned",
    "wikitext2-tuned-deep": "WikiText-2, tuned, deeper",
    "wikitext2-post-merge": "WikiText-2, net on all merges",
    "ptb": "PTB",
    "ptb-1k": "PTB, 1k",
    "ptb-tuned": "PTB, tuned",
    "ptb-tuned-deep": "PTB, tuned, deeper",
    "webmix": "webmix",
}
"""Folder in results/ → name in tables. Folder NAME-MORE is shown with NAME: each config of a model needs a folder."""
NO_STUDIES = {"demo", "sweeps", "associativity", "tasks", "unfinished"}
TASK_STUDIES = {
    "groups": "Word problems of groups",
    "regular-languages": "Regular languages",
    "recall": "Recall",
    "context-free": "Context-free tasks",
    "groups-quick": "Word problems of groups: a quick look on a CPU",
}
"""Folder in results/tasks/ → heading. Each holds the result files of one study of tasks."""


Sweep = dict[str, Any]
"""The contents of a sweep's sweep.json."""


class Kept(NamedTuple):
    """The contents of results/."""

    studies: dict[str, Results]
    """Results by study, in the order of `STUDIES`; other folders come last."""
    sweeps: dict[str, dict[str, Sweep]]
    """Study → model → its sweep."""
    associativity: dict[str, Associativity]
    tasks: dict[str, list[TaskResult]]
    """Results by study of tasks, in the order of `TASK_STUDIES`."""
    commands: dict[str, str]
    """Associativity study → the command that made it."""
    sources: dict[str, str]
    """Study, sweeps or associativity study → its path in results/ and a hash of the files there."""


def read_kept(folder: Path) -> Kept:
    studies = {path.name: path for path in folder.iterdir() if path.name not in NO_STUDIES and any(path.glob("*.json"))}
    places = {home: place for place, home in enumerate([*STUDIES, None])}
    names = sorted(studies, key=lambda name: (places[home_of(name)], name))
    associativity = {path: _read(path) for path in sorted((folder / "associativity").glob("*.json"))}
    for stray in (folder / "sweeps").glob("*.json"):
        raise UserError(f"{stray} belongs in a folder of its own, named after its study")
    of_tasks = {name: folder / "tasks" / name for name in TASK_STUDIES if any((folder / "tasks" / name).glob("*.json"))}
    for stray in (path for path in (folder / "tasks").glob("*") if path.name not in TASK_STUDIES):
        raise UserError(f"{stray} has no name in TASK_STUDIES of docs/figures/results_page/kept.py; give it one there")
    folders = {path.parent for path in (folder / "sweeps").glob("*/*.json")}
    searched = sorted(folders, key=lambda path: (places[home_of(path.name)], path.name))
    return Kept(
        studies={name: read_results(studies[name]) for name in names},
        sweeps={path.name: _read_sweeps(path) for path in searched},
        associativity={path.stem: Associativity.from_dict(one, str(path)) for path, one in associativity.items()},
        tasks={name: read_task_results(path) for name, path in of_tasks.items()},
        commands={path.stem: one.get("command", "not recorded") for path, one in associativity.items()},
        sources={name: _source(name, sorted(path.glob("*.json"))) for name, path in studies.items()}
        | {f"sweeps/{path.name}": _source(f"sweeps/{path.name}", sorted(path.glob("*.json"))) for path in searched}
        | {f"tasks/{name}": _source(f"tasks/{name}", sorted(path.glob("*.json"))) for name, path in of_tasks.items()}
        | {f"associativity/{path.stem}": _source(f"associativity/{path.name}", [path]) for path in associativity},
    )


def _read_sweeps(folder: Path) -> dict[str, Sweep]:
    """Read the sweeps of a folder by model, in the order of the recipes."""
    sweeps = {path: _read_sweep(path) for path in sorted(folder.glob("*.json"))}
    corpus = next(iter(sweeps.values()))["config"]["data"]["corpus"]
    by_row: dict[str, Sweep] = {}
    for path, sweep in sweeps.items():
        row = sweep["recipe"].removeprefix(f"{corpus}-")
        if sweep["config"]["data"]["corpus"] != corpus or row in by_row:
            raise UserError(
                f"{path}: a study has one corpus, and one sweep for each model; move it to a folder of its own"
            )
        by_row[row] = sweep
    return {row: by_row[row] for row in in_order(by_row, corpus)}


def _read_sweep(path: Path) -> Sweep:
    saved = _read(path)
    is_one = isinstance(saved, dict) and {"recipe", "space", "config", "best", "trials"} <= saved.keys()
    if not is_one or not {"data", "train"} <= saved["config"].keys():
        raise UserError(f"{path} is not the sweep.json of a sweep; move it elsewhere")
    return saved


def _read(path: Path) -> Any:
    """Read a file of a sweep or of associativity, and verify its checksum."""
    saved = read_json(path)
    return unseal(saved, path, "make it again") if isinstance(saved, dict) else saved


def _source(place: str, files: list[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        total.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return f"results/{place} {total.hexdigest()}"


def home_of(name: str) -> str | None:
    """Return the study that a folder belongs to: the longest name in `STUDIES` that its own begins with."""
    return max((study for study in STUDIES if f"{name}-".startswith(f"{study}-")), key=len, default=None)


def label_of(name: str) -> str:
    """Return the name of a folder in tables."""
    home = home_of(name)
    if home is None:
        return name
    more = name.removeprefix(home).replace("-", " ").strip()
    if more and home.endswith("-deep"):
        more += " layers"
    return f"{STUDIES[home]}, {more}" if more else STUDIES[home]
