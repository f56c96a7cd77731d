"""The context lengths that the page speaks of, and how far a model's perplexity holds beyond that of training."""

from collections.abc import Sequence
from dataclasses import replace

from logdepth.report.table import Spread, Table
from logdepth.results import RunResult

TRAINED, LONGEST = 512, 2976
SHOWN = (32, 160, TRAINED, 1056, 2080, LONGEST)
"""Of the 25 that were measured; where one was not, the nearest."""


def over_trained(seeds: Sequence[RunResult]) -> Spread | None:
    """Perplexity at the longest context over that at the length of training, seed by seed."""
    ratios = [
        long.token_perplexity / short.token_perplexity
        for run in seeds
        if (long := run.at(LONGEST)) and (short := run.at(TRAINED))
    ]
    return Spread.of(ratios, 3) if ratios else None


def thinned(table: Table) -> Table:
    """A row a length, of a few lengths: all would be too many for a page."""
    lengths = [row[0] for row in table.rows if isinstance(row[0], int)]
    shown = {min(lengths, key=lambda one: abs(one - wanted)) for wanted in SHOWN}
    if len(shown) == len(lengths):
        return table
    note = f"{table.note} Here are {len(shown)} of {len(lengths)} lengths; the result files have all."
    return replace(table, note=note, rows=tuple(row for row in table.rows if row[0] in shown))
