"""The run that the page shows, and how what is in it is named and written."""

from pathlib import Path
from typing import Any

from benchmarks.speed import bars
from logdepth.atomic import read_json
from logdepth.errors import UserError

ROOT = Path(__file__).parents[3]
Report = dict[str, Any]
Result = dict[str, Any]


def latest_report(folder: Path = ROOT / "results") -> Report:
    """The run that the page shows."""
    reports = [read_json(path) for path in sorted(folder.glob("speed-*.json"))]
    found = max((one for one in reports if not one["smoke"]), key=lambda report: report["date"], default=None)
    if found is None:
        raise UserError("no results/speed-*.json: run benchmarks/gpu.py first")
    return found


def results(report: Report, part: str) -> list[Result]:
    """What a part measured, without what failed."""
    return bars.fitting(report["parts"].get(part, {"results": []})["results"])


def measured(report: Report) -> dict[str, list[Result]]:
    return {name: part["results"] for name, part in report["parts"].items()}


def variant(one: Result) -> str:
    extra = "recomputing" if one.get("recompute") else one.get("loss")
    return f"{one['model']}, {extra}" if extra else str(one["model"])


def mebibytes(one: Result) -> float | None:
    return None if one["peak_bytes"] is None else one["peak_bytes"] / 2**20


def places_of(one: Result) -> str:
    """How many tokens the rows had read."""
    return f"{one['absorbed']:,}" + (f" ± {one['spread']}" if one["spread"] else "")


def number(value: float | None) -> str:
    """Three digits or so, as a table wants them."""
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if abs(value) < 100 else f"{value:.0f}"
