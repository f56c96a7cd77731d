"""Tables as Markdown, and the text shown where nothing was measured."""

from collections.abc import Iterable

from logdepth.report.table import markdown_lines

NOTHING = "*Not measured yet.*"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table whose first column is left-aligned and whose other columns are right-aligned."""
    heads, texts = list(head), [list(row) for row in rows]
    return markdown_lines(heads, texts, [column > 0 for column in range(len(heads))]) if texts else NOTHING
