"""Writing a report: tables in four formats, figures in two, and one page with everything in it."""

from pathlib import Path
from typing import NamedTuple

from logdepth.atomic import write_text
from logdepth.drawing import can_draw, require_matplotlib, save
from logdepth.errors import UserError
from logdepth.report.content import tables
from logdepth.report.figures import figures
from logdepth.report.page import page
from logdepth.report.table import FORMATS, Table
from logdepth.results import Results, read_results


class Report(NamedTuple):
    tables: list[Table]
    page: Path | None
    """None where matplotlib is not there to draw its figures."""


def write_what_can_be(folder: Path) -> Report:
    """Makes tables/ of a study's folder from its results/, and figures/ and report.html where they can be drawn."""
    results = _results(folder)
    made = tables(results)
    for table in made:
        for suffix, written in FORMATS.items():
            write_text(folder / "tables" / f"{table.name}.{suffix}", written(table))
    _remove_others(folder / "tables", {f"{table.name}.{suffix}" for table in made for suffix in FORMATS})
    if not can_draw():
        return Report(made, None)
    drawn = figures(results)
    for name, (_, figure) in drawn.items():
        save(figure, folder / "figures" / name)
    _remove_others(folder / "figures", {f"{name}.{suffix}" for name in drawn for suffix in ("svg", "png")})
    write_text(folder / "report.html", page(results, made, drawn))
    return Report(made, folder / "report.html")


def write_report(folder: Path) -> Path:
    """Makes all of a study's report; returns the page's path."""
    require_matplotlib()
    written = write_what_can_be(folder).page
    assert written is not None
    return written


def _results(folder: Path) -> Results:
    results = read_results(folder / "results")
    if not results.runs and not results.timings:
        raise UserError(f"{folder / 'results'} holds no result files; make some with `logdepth reproduce`")
    return results


def _remove_others(folder: Path, made: set[str]) -> None:
    """What older results left would be taken for new."""
    for file in folder.iterdir():
        if file.name not in made and file.suffix[1:] in {*FORMATS, "svg", "png"}:
            file.unlink()
