"""Tables of numbers, and the four formats in which they are written: Markdown, LaTeX, CSV and JSON."""

import csv
import io
import json
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

LATEX_SIGNS = {
    "\\": r"\textbackslash{}",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "±": r"$\pm$",
    "×": r"$\times$",
    "–": "--",
    **{sign: rf"\{sign}" for sign in "%_&#${}"},
}


HUGE = 1e9
"""Numbers from here on are shown in scientific notation, because losses of diverged models have twenty digits."""


class Spread(NamedTuple):
    """A mean over seeds and its standard deviation, which is None for a single seed."""

    mean: float
    deviation: float | None
    digits: int = 2

    @classmethod
    def of(cls, values: Sequence[float], digits: int = 2) -> "Spread":
        """Return the mean and standard deviation of `values`; an infinite mean if a value is not finite."""
        if not all(map(math.isfinite, values)):
            return cls(math.inf, None, digits)
        return cls(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None, digits)

    def __str__(self) -> str:
        parts = (self.mean,) if self.deviation is None else (self.mean, self.deviation)
        is_long = HUGE <= abs(self.mean) < math.inf
        return " ± ".join(f"{one:.1e}" if is_long else f"{one:,.{self.digits}f}" for one in parts)


Cell = Spread | float | int | str | None


@dataclass(frozen=True, kw_only=True)
class Table:
    """A table with a title and an explanatory note."""

    name: str
    """Name of its files, without suffix."""
    title: str
    """Title printed above the table."""
    note: str
    """Explanation printed below the table."""
    heads: tuple[str, ...]
    """Column headings."""
    rows: tuple[tuple[Cell, ...], ...]
    """Rows of cells, one cell per column."""

    def is_numeric(self, column: int) -> bool:
        """Return whether a column contains no text."""
        return all(not isinstance(row[column], str) for row in self.rows)

    def texts(self) -> list[list[str]]:
        """Return the formatted cells."""
        return [[shown(cell) for cell in row] for row in self.rows]


def shown(cell: Cell) -> str:
    """Format a cell."""
    if cell is None:
        return "–"
    if isinstance(cell, float):
        return f"{cell:,.4g}" if abs(cell) < 1 else f"{cell:,.2f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)


def as_markdown(table: Table) -> str:
    """Return the table in Markdown, with its title and note."""
    numeric = [table.is_numeric(column) for column in range(len(table.heads))]
    return f"**{table.title}**\n\n{markdown_lines(table.heads, table.texts(), numeric)}\n\n{table.note}\n"


def markdown_lines(heads: Sequence[str], texts: Sequence[Sequence[str]], numeric: Sequence[bool]) -> str:
    """Return only the rows in Markdown, with numeric columns aligned right."""
    lines = [heads, ["---:" if right else "---" for right in numeric], *texts]
    return "\n".join("| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines)


def as_latex(table: Table) -> str:
    """Return the table in LaTeX, with booktabs rules and a caption."""
    columns = "".join("r" if table.is_numeric(column) else "l" for column in range(len(table.heads)))
    lines = [" & ".join(map(_latex, line)) + r" \\" for line in (table.heads, *table.texts())]
    return "\n".join(
        [
            r"\begin{table}",
            r"\centering",
            rf"\begin{{tabular}}{{{columns}}}",
            r"\toprule",
            lines[0],
            r"\midrule",
            *lines[1:],
            r"\bottomrule",
            r"\end{tabular}",
            rf"\caption{{{_latex(table.title)}. {_latex(table.note)}}}",
            rf"\label{{tab:{table.name}}}",
            r"\end{table}",
            "",
        ]
    )


def as_csv(table: Table) -> str:
    """Return the table in CSV with full precision. A column of deviations follows each column of means."""
    spread = [any(isinstance(row[column], Spread) for row in table.rows) for column in range(len(table.heads))]
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    heads = [[head, f"{head}, deviation"] if wide else [head] for head, wide in zip(table.heads, spread, strict=True)]
    writer.writerow([name for pair in heads for name in pair])
    for row in table.rows:
        cells = [_numbers(cell) if wide else [cell] for cell, wide in zip(row, spread, strict=True)]
        writer.writerow([number for pair in cells for number in pair])
    return buffer.getvalue()


def as_json(table: Table) -> str:
    """Return the table in JSON with full precision, one object per row."""
    rows = [{head: _plain(cell) for head, cell in zip(table.heads, row, strict=True)} for row in table.rows]
    facts = {"table": table.name, "title": table.title, "note": table.note, "rows": rows}
    return json.dumps(facts, indent=2, ensure_ascii=False) + "\n"


FORMATS = {"md": as_markdown, "tex": as_latex, "csv": as_csv, "json": as_json}
"""Maps file suffixes to formatting functions."""


def _latex(text: str) -> str:
    return re.sub(r"[\\^~±×–%_&#${}]", lambda sign: LATEX_SIGNS[sign[0]], text)


def _numbers(cell: Cell) -> list[Any]:
    return [cell.mean, cell.deviation] if isinstance(cell, Spread) else [cell, None]


def _plain(cell: Cell) -> Any:
    if isinstance(cell, Spread):
        return {"mean": cell.mean if math.isfinite(cell.mean) else None, "deviation": cell.deviation}
    return cell
