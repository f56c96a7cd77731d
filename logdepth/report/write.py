"""Write a report: tables in four formats, figures in two, and one HTML page that contains everything."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from logdepth.atomic import write_text
from logdepth.drawing import can_draw, require_matplotlib, save
from logdepth.errors import UserError
from logdepth.report.content import tables
from logdepth.report.figures import figures
from logdepth.report.page import page
from logdepth.report.table import FORMATS, Table
from logdepth.results import Results, read_results

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Report(NamedTuple):
    """A written report."""

    tables: list[Table]
    page: Path | None
    """Path of report.html; None if matplotlib is not installed."""


def write_available(folder: Path) -> Report:
    """Write a study's tables/ from its results/; if matplotlib is installed, also figures/ and report.html."""
    results = _results(folder)
    made = tables(results)
    return write_parts(folder, made, lambda: figures(results), lambda drawn: page(results, made, drawn))


def write_parts(
    folder: Path,
    made: list[Table],
    draw: "Callable[[], Mapping[str, tuple[str, Figure]]]",
    render: "Callable[[Mapping[str, tuple[str, Figure]]], str]",
) -> Report:
    """Write tables, and if matplotlib is installed also figures and the page that contains everything.

    Args:
        folder: the folder of the study.
        made: its tables.
        draw: draws its figures, each with a caption and by its name.
        render: makes the page from the figures.
    """
    for table in made:
        for suffix, written in FORMATS.items():
            write_text(folder / "tables" / f"{table.name}.{suffix}", written(table))
    _remove_others(folder / "tables", {f"{table.name}.{suffix}" for table in made for suffix in FORMATS})
    if not can_draw():
        return Report(made, None)
    drawn = draw()
    for name, (_, figure) in drawn.items():
        save(figure, folder / "figures" / name)
    _remove_others(folder / "figures", {f"{name}.{suffix}" for name in drawn for suffix in ("svg", "png")})
    write_text(folder / "report.html", render(drawn))
    return Report(made, folder / "report.html")


def write_report(folder: Path) -> Path:
    """Write a study's complete report; return the path of report.html."""
    require_matplotlib()
    written = write_available(folder).page
    assert written is not None
    return written


def _results(folder: Path) -> Results:
    results = read_results(folder / "results")
    if not results.runs and not results.timings:
        raise UserError(f"{folder / 'results'} contains no result files; create some with `logdepth reproduce`")
    return results


def _remove_others(folder: Path, made: set[str]) -> None:
    """Remove files of earlier reports, which could be mistaken for current ones."""
    for file in folder.iterdir():
        if file.name not in made and file.suffix[1:] in {*FORMATS, "svg", "png"}:
            file.unlink()
