"""How tables stand on the page, and what stands where there is nothing to show."""

from collections.abc import Iterable

from logdepth.report.table import Cell, Table, as_markdown

NOTHING = "*Not run yet.*"


def markdown(table: Table) -> str:
    """Without a title where the page has one."""
    return as_markdown(table).removeprefix("****").strip()


def table(heads: Iterable[str], rows: Iterable[tuple[Cell, ...]], *, title: str = "", note: str = "") -> str:
    """One that is of no study, and has no file of its own to be named for."""
    return markdown(Table(name="", title=title, note=note, heads=tuple(heads), rows=tuple(rows)))
