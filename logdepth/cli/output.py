"""Print results on stdout, as aligned tables or as JSON."""

import json
import sys
from collections.abc import Sequence
from typing import Any

from logdepth.report.table import shown


def print_json(value: Any) -> None:
    """Print a value as indented JSON. If stdout is not UTF-8, other characters are escaped as JSON does it."""
    unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    print(json.dumps(value, indent=2, ensure_ascii=not unicode))


def print_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table in aligned columns, with text aligned left and numbers aligned right."""
    cells = [[shown(cell) for cell in row] for row in rows]
    widths = [max(len(line[column]) for line in [list(heads), *cells]) for column in range(len(heads))]
    numeric = [all(not isinstance(row[column], str) for row in rows) for column in range(len(heads))]
    for line in [list(heads), *cells]:
        padded = [
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, numeric, strict=True)
        ]
        print("  ".join(padded).rstrip())
