"""Writing a report: tables in four formats, figures in two, and one page with everything in it."""

from pathlib import Path

from logdepth.atomic import replacing
from logdepth.drawing import require_matplotlib, save
from logdepth.errors import UserError
from logdepth.report.content import tables
from logdepth.report.figures import figures
from logdepth.report.page import page
from logdepth.report.table import FORMATS, Table
from logdepth.results import Results, read_results


def write_tables(folder: Path) -> list[Table]:
    """Makes tables/ of a study's folder from its results/."""
    made = tables(_results(folder))
    for table in made:
        for suffix, written in FORMATS.items():
            _write(folder / "tables" / f"{table.name}.{suffix}", written(table))
    _remove_others(folder / "tables", {f"{table.name}.{suffix}" for table in made for suffix in FORMATS})
    return made


def write_report(folder: Path) -> Path:
    """Makes tables/, figures/ and report.html of a study's folder from its results/; returns the page's path."""
    require_matplotlib()
    results, made = _results(folder), write_tables(folder)
    drawn = figures(results)
    for name, (_, figure) in drawn.items():
        save(figure, folder / "figures" / name)
    _remove_others(folder / "figures", {f"{name}.{suffix}" for name in drawn for suffix in ("svg", "png")})
    _write(folder / "report.html", page(results, made, drawn))
    return folder / "report.html"


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


def _write(path: Path, text: str) -> None:
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")
