"""What results/ keeps, read whole: studies, sweeps and studies of associativity; and what studies are called."""

import hashlib
from pathlib import Path
from typing import Any, NamedTuple

from logdepth.associativity import Associativity
from logdepth.atomic import read_json
from logdepth.errors import UserError
from logdepth.report.content import in_order
from logdepth.results import Results, read_results

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
"""Folder of results/ → name in tables. A folder NAME-MORE is shown with NAME: each config of a model needs its own."""
NO_STUDIES = {"demo", "sweeps", "associativity"}


Sweep = dict[str, Any]
"""The sweep.json of one."""


class Kept(NamedTuple):
    """All that results/ holds."""

    studies: dict[str, Results]
    """In the order of `STUDIES`; those that are not in it last."""
    sweeps: dict[str, dict[str, Sweep]]
    """A study → a model → what was searched for it."""
    associativity: dict[str, Associativity]
    commands: dict[str, str]
    """A study of associativity → what was typed."""
    sources: dict[str, str]
    """A study, the sweeps of one, or a study of associativity → its place in results/, and a hash of what is there."""


def read_kept(folder: Path) -> Kept:
    studies = {path.name: path for path in folder.iterdir() if path.name not in NO_STUDIES and any(path.glob("*.json"))}
    places = {home: place for place, home in enumerate([*STUDIES, None])}
    names = sorted(studies, key=lambda name: (places[home_of(name)], name))
    associativity = {path: read_json(path) for path in sorted((folder / "associativity").glob("*.json"))}
    for stray in (folder / "sweeps").glob("*.json"):
        raise UserError(f"{stray} belongs in a folder of its own, named for the study that it was for")
    folders = {path.parent for path in (folder / "sweeps").glob("*/*.json")}
    searched = sorted(folders, key=lambda path: (places[home_of(path.name)], path.name))
    return Kept(
        studies={name: read_results(studies[name]) for name in names},
        sweeps={path.name: _read_sweeps(path) for path in searched},
        associativity={path.stem: Associativity.from_dict(one, str(path)) for path, one in associativity.items()},
        commands={path.stem: one.get("command", "not said") for path, one in associativity.items()},
        sources={name: _source(name, sorted(path.glob("*.json"))) for name, path in studies.items()}
        | {f"sweeps/{path.name}": _source(f"sweeps/{path.name}", sorted(path.glob("*.json"))) for path in searched}
        | {f"associativity/{path.stem}": _source(f"associativity/{path.name}", [path]) for path in associativity},
    )


def _read_sweeps(folder: Path) -> dict[str, Sweep]:
    """By model, in the order of the recipes."""
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
    saved = read_json(path)
    is_one = isinstance(saved, dict) and {"recipe", "space", "config", "best", "trials"} <= saved.keys()
    if not is_one or not {"data", "train"} <= saved["config"].keys():
        raise UserError(f"{path} is not the sweep.json of a sweep; move it away")
    return saved


def _source(place: str, files: list[Path]) -> str:
    total = hashlib.sha256()
    for file in files:
        total.update(file.name.encode() + b"\0" + hashlib.sha256(file.read_bytes()).digest())
    return f"results/{place} {total.hexdigest()}"


def home_of(name: str) -> str | None:
    """The study with which a folder is shown: its own, or the longest that its name goes on from."""
    return max((study for study in STUDIES if f"{name}-".startswith(f"{study}-")), key=len, default=None)


def label_of(name: str) -> str:
    """A folder's name in tables."""
    home = home_of(name)
    if home is None:
        return name
    more = name.removeprefix(home).replace("-", " ").strip()
    if more and home.endswith("-deep"):
        more += " layers"
    return f"{STUDIES[home]}, {more}" if more else STUDIES[home]
