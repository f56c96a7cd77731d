"""How tables stand on the page, and what stands where nothing was measured."""

from collections.abc import Iterable

from logdepth.report.table import markdown_lines

NOTHING = "*Not measured yet.*"


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """The first column to the left, the others to the right."""
    heads, texts = list(head), [list(row) for row in rows]
    return markdown_lines(heads, texts, [column > 0 for column in range(len(heads))]) if texts else NOTHING
