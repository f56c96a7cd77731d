"""ListOps: the value of nested lists of digits, such as [MAX 2 9 [MIN 4 7] 0]."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import numpy as np
from numpy.random import Generator

from logdepth.tasks.task import Case, Examples, Floats, Integers, Task

MIN, MAX, MEDIAN, SUM, CLOSE = range(10, 15)
"""Symbols that open a list of an operator, and the one that closes it; those below are the digits."""

MIN_ARGUMENTS, MAX_ARGUMENTS = 2, 5
MAX_DEPTH = 20
"""The most lists around a digit."""
LIST_PROBABILITY = 0.25
"""How often an argument is a list in the original generator."""
LONGEST = 2000
"""More symbols take tables too long to compute; the probabilities of lengths take time quadratic in the length."""


@dataclass(frozen=True, kw_only=True)
class ListOps(Task):
    """ListOps (Nangia and Bowman, arXiv 1804.06028): the value of nested lists, asked at the last symbol.

    Symbols are the digits, one for each of [MIN, [MAX, [MED and [SM, which open a list, and ]. A list has 2 to 5
    arguments, each a digit or a list, and at most 20 lists are around a digit. [MED is the median, rounded down, and
    [SM the sum modulo 10. Operators and digits are uniform.

    The original generator makes an argument a list with probability 0.25, up to depth 20, whatever length results. Here
    the length is given, and the shape of the lists has the distribution of that generator, conditioned on the length.
    Lengths are 1, a single digit, and 4 to 2,000.

    The RIR paper (Ray Chowdhury and Caragea, arXiv 2311.04449) trains on lists of at most 100 symbols from that
    generator, most of which are short, and tests on lengths of 200 to 300, 300 to 400, … and 900 to 1,000. Here,
    training lengths are 4 to 100, equally likely, and test lengths are the middles of those ranges, after 50, 100 and
    150. Its other tests, with 10 and 15 arguments, are not covered.
    """

    family: ClassVar[str] = "context-free"

    @property
    def num_symbols(self) -> int:
        return 15

    @property
    def num_classes(self) -> int:
        return 10

    @property
    def chance(self) -> float:
        """The share of zeros and of nines, the most frequent values, as measured at 100 and 450 symbols."""
        return 0.12

    @property
    def train_cases(self) -> Sequence[Case]:
        return [Case(length) for length in range(4, 101)]

    @property
    def test_cases(self) -> Sequence[Case]:
        return [Case(length) for length in (50, 100, 150, *range(250, 951, 100))]

    def token_text(self, token: int) -> str:
        return str(token) if token < MIN else ("[MIN", "[MAX", "[MED", "[SM", "]")[token - MIN]

    def sample(self, rng: Generator, batch: int, case: Case) -> Examples:
        length = case.length
        if not (length == 1 or 4 <= length <= LONGEST):
            raise ValueError(f"length is {length}: lists have 1 or 4 to {LONGEST} symbols")
        if case.items:
            raise ValueError(f"items is {case.items}: the length says it all here, give 0")
        tokens, values = _lists(rng, batch, length)
        targets, mask = np.zeros_like(tokens), np.zeros(tokens.shape, dtype=bool)
        targets[:, -1], mask[:, -1] = values, True
        return Examples(tokens, targets, mask)


class _Level(NamedTuple):
    """All lists of one depth in a batch. Rows of the batch lie one after the other in flat arrays."""

    starts: Integers
    """Where they open."""
    operators: Integers
    counts: Integers
    """How many arguments they have."""
    arguments: Integers
    """Where their arguments start, those of one list after those of another."""


def _lists(rng: Generator, batch: int, length: int) -> tuple[Integers, Integers]:
    """Lists and their values: `[batch, length]` and `[batch]`. All lists of one depth are drawn at once."""
    chances = _chances(max(64, 2 ** length.bit_length()))
    tokens = rng.integers(10, size=batch * length)
    starts, sizes = length * np.arange(batch), np.full(batch, length)
    levels: list[_Level] = []
    while (is_list := sizes > 1).any():
        starts, sizes = starts[is_list], sizes[is_list]
        operators = rng.integers(MIN, CLOSE, size=len(starts))
        tokens[starts], tokens[starts + sizes - 1] = operators, CLOSE
        counts, inner = _argument_sizes(rng, chances[MAX_DEPTH - 1 - len(levels)], sizes - 2)
        filled = np.arange(MAX_ARGUMENTS) < counts[:, None]
        arguments = (starts[:, None] + 1 + inner.cumsum(axis=1) - inner)[filled]
        levels.append(_Level(starts, operators, counts, arguments))
        starts, sizes = arguments, inner[filled]

    values = tokens.copy()
    for level in reversed(levels):
        values[level.starts] = _evaluate(level.operators, level.counts, values[level.arguments])
    return tokens.reshape(batch, length), values[::length]


def _evaluate(operators: Integers, counts: Integers, arguments: Integers) -> Integers:
    """`[lists]`: the values of lists, whose arguments follow one another in a flat array."""
    beyond = 10
    rows = np.full((len(counts), MAX_ARGUMENTS), beyond)
    rows[np.arange(MAX_ARGUMENTS) < counts[:, None]] = arguments
    rows.sort(axis=1)
    numbers = np.arange(len(counts))
    medians = (rows[numbers, (counts - 1) // 2] + rows[numbers, counts // 2]) // 2
    sums = np.where(rows < beyond, rows, 0).sum(axis=1) % 10
    return np.choose(operators - MIN, [rows[:, 0], rows[numbers, counts - 1], medians, sums])


def _argument_sizes(rng: Generator, chances: Floats, totals: Integers) -> tuple[Integers, Integers]:
    """The number of arguments of lists `[lists]`, and their sizes `[lists, MAX_ARGUMENTS]`, which have these totals."""
    choices = chances[MIN_ARGUMENTS:, totals].cumsum(axis=0)
    counts = MIN_ARGUMENTS + (rng.random(len(totals)) * choices[-1] >= choices[:-1]).sum(axis=0)
    sizes = np.zeros((len(totals), MAX_ARGUMENTS), dtype=np.int64)
    left = totals.copy()
    for argument in range(MAX_ARGUMENTS):
        after = counts - argument - 1  # how many arguments follow
        sizes[after == 0, argument] = left[after == 0]
        lists = np.flatnonzero(after > 0)
        if len(lists):
            sizes[lists, argument] = _first_size(rng, chances, after[lists], left[lists])
            left -= sizes[:, argument]
    return counts, sizes


def _first_size(rng: Generator, chances: Floats, after: Integers, left: Integers) -> Integers:
    """The size of one argument, where `left` symbols are for it and for `after` more arguments."""
    most = left - after
    last = most.cumsum()
    sizes = np.arange(last[-1]) - np.repeat(last - most, most) + 1
    weights = chances[1, sizes] * chances[np.repeat(after, most), np.repeat(left, most) - sizes]
    # Each list's weights sum to about 1, so that one running sum over all of them is precise.
    up_to = (weights / np.repeat(chances[after + 1, left], most)).cumsum()
    before = np.concatenate([[0.0], up_to[last[:-1] - 1]])
    drawn = before + rng.random(len(left)) * (up_to[last - 1] - before)
    found: Integers = sizes[np.minimum(np.searchsorted(up_to, drawn, side="right"), last - 1)]
    return found


@lru_cache(maxsize=8)
def _chances(length: int) -> Floats:
    """`[depth, arguments, total]`: the probability that arguments with lists of at most a depth have a total size."""
    chances = np.zeros((MAX_DEPTH, MAX_ARGUMENTS + 1, length + 1))
    chances[:, 0, 0] = 1
    for depth in range(MAX_DEPTH):
        chances[depth, 1, 1] = 1
        if depth:
            lists = chances[depth - 1, MIN_ARGUMENTS:, : length - 1].mean(axis=0)
            chances[depth, 1, 1] = 1 - LIST_PROBABILITY
            chances[depth, 1, 2:] = LIST_PROBABILITY * lists
        for arguments in range(2, MAX_ARGUMENTS + 1):
            both = np.convolve(chances[depth, arguments - 1], chances[depth, 1])
            chances[depth, arguments] = both[: length + 1]
    return chances
