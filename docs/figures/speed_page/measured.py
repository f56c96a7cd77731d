"""Reads the benchmark run that the pages show, and names and formats what is in it."""

from pathlib import Path
from typing import Any

from benchmarks.speed import bars
from logdepth.atomic import read_json
from logdepth.errors import UserError

ROOT = Path(__file__).parents[3]
FLOORS = {"every_token": "leaves per token", "as_run": "leaves as run"}
"""Floor in result files → its name on the pages."""
Report = dict[str, Any]
Result = dict[str, Any]


def latest_report(folder: Path = ROOT / "results") -> Report:
    """Return the latest run that is not a smoke test."""
    reports = [read_json(path) for path in sorted(folder.glob("speed-*.json"))]
    found = max((one for one in reports if not one["smoke"]), key=lambda report: report["date"], default=None)
    if found is None:
        raise UserError("no results/speed-*.json: run benchmarks/gpu.py first")
    return found


def results(report: Report, part: str) -> list[Result]:
    """Return the results of a part without failed measurements."""
    return bars.fitting(report["parts"].get(part, {"results": []})["results"])


def measured(report: Report) -> dict[str, list[Result]]:
    return {name: part["results"] for name, part in report["parts"].items()}


def variant(one: Result) -> str:
    extra = "recomputing" if one.get("recompute") else one.get("loss")
    return f"{one['model']}, {extra}" if extra else str(one["model"])


def mebibytes(one: Result) -> float | None:
    return None if one["peak_bytes"] is None else one["peak_bytes"] / 2**20


def tokens_read(one: Result) -> str:
    """Return the number of tokens read before decoding, with its spread over the batch."""
    return f"{one['absorbed']:,}" + (f" ± {one['spread']}" if one["spread"] else "")


def number(value: float | None) -> str:
    """Format a number with about three digits."""
    if value is None:
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".") if abs(value) < 100 else f"{value:.0f}"
