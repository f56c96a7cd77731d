"""The context lengths shown on the pages, and the ratio of perplexity beyond the training length."""

from collections.abc import Sequence
from dataclasses import replace

from logdepth.report.table import Spread, Table
from logdepth.results import RunResult

TRAINED, LONGEST = 512, 2976
SHOWN = (32, 160, TRAINED, 1056, 2080, LONGEST)
"""The context lengths shown, of 25 measured; where one was not measured, the nearest is shown."""


def over_trained(seeds: Sequence[RunResult]) -> Spread | None:
    """Return token perplexity at the longest context divided by that at the training length, per seed."""
    ratios = [
        long.token_perplexity / short.token_perplexity
        for run in seeds
        if (long := run.at(LONGEST)) and (short := run.at(TRAINED))
    ]
    return Spread.of(ratios, 3) if ratios else None


def thinned(table: Table) -> Table:
    """Keep the rows of a few context lengths: all 25 would be too many for a page."""
    lengths = [row[0] for row in table.rows if isinstance(row[0], int)]
    shown = {min(lengths, key=lambda one: abs(one - wanted)) for wanted in SHOWN}
    if len(shown) == len(lengths):
        return table
    note = f"{table.note} The table shows {len(shown)} of {len(lengths)} context lengths; the result files have all."
    return replace(table, note=note, rows=tuple(row for row in table.rows if row[0] in shown))
