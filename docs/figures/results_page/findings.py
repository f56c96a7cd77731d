"""What the runs of a study measured against a target: one model, two models compared, or all models in order."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from logdepth.report.content import by_row, three_units, title_of
from logdepth.report.table import Spread
from logdepth.results import RunResult

FEWEST_SEEDS = 3
"""Seeds that each model needs before every seed of one can be compared with every seed of another."""


class Finding(NamedTuple):
    """What a study measured against a target."""

    text: str
    value: float | None = None
    """The number to judge; None where the target only asks that the numbers are shown."""


Runs = Sequence[RunResult]
Find = Callable[[Runs], Finding | None]


def word_perplexity(seeds: Runs) -> Spread:
    return three_units(seeds)[1]


def bits_per_byte(seeds: Runs) -> Spread:
    return three_units(seeds)[2]


def of_model(row: str, value: Callable[[Runs], Spread | None], most: float = math.inf) -> Find:
    """Find a number of one model, if it has at most `most` million parameters as the tables round them."""

    def find(runs: Runs) -> Finding | None:
        seeds = by_row(runs).get(row, [])
        found = value(seeds) if seeds and round(seeds[0].parameters / 1e6, 1) <= most else None
        return Finding(str(found), found.mean) if found else None

    return find


def of_two(ours: str, theirs: str, compare: Callable[[Runs, Runs], Finding]) -> Find:
    """Compare two models, if the study has both."""

    def find(runs: Runs) -> Finding | None:
        models = by_row(runs)
        return compare(models[ours], models[theirs]) if ours in models and theirs in models else None

    return find


def below(ours: Runs, theirs: Runs) -> Finding:
    """Divide the greatest perplexity of one model by the least of the other: below 1 if all seeds are below."""
    lower, higher = ([run.main.token_perplexity for run in seeds] for seeds in (ours, theirs))
    enough = min(len(lower), len(higher)) >= FEWEST_SEEDS
    return Finding(f"{Spread.of(lower)} and {Spread.of(higher)}", max(lower) / min(higher) if enough else None)


def gap(ours: Runs, theirs: Runs) -> Finding:
    """Return the difference in bits per byte between two models."""
    first, second = (bits_per_byte(seeds).mean for seeds in (ours, theirs))
    return Finding(f"{first - second:+.4f} ({first:.4f} and {second:.4f})")


def order(runs: Runs) -> Finding | None:
    """List all models by bits per byte, best first."""
    found = sorted(((bits_per_byte(seeds), row) for row, seeds in by_row(runs).items()), key=lambda one: one[0].mean)
    return Finding(" < ".join(f"{title_of(row)} {bits}" for bits, row in found)) if len(found) > 1 else None
