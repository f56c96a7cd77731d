"""Tables as Markdown, and the text shown where there are no results."""

from collections.abc import Iterable

from logdepth.report.table import Cell, Table, as_markdown

NOTHING = "*Not run yet.*"


def markdown(table: Table) -> str:
    """Return a table as Markdown; an empty title is left out."""
    return as_markdown(table).removeprefix("****").strip()


def table(heads: Iterable[str], rows: Iterable[tuple[Cell, ...]], *, title: str = "", note: str = "") -> str:
    """Return a table that belongs to no study and is not written to a file of its own."""
    return markdown(Table(name="", title=title, note=note, heads=tuple(heads), rows=tuple(rows)))
