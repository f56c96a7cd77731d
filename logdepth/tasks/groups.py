"""Word problems of finite groups: multiply the elements read so far."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import permutations
from typing import ClassVar

import numpy as np
from numpy.random import Generator

from logdepth.tasks.automaton import chain
from logdepth.tasks.task import Booleans, Case, Examples, Integers, Task

Permutation = tuple[int, ...]
"""The point to which each point goes."""

SEEN_PAIRS_ONLY = 1
"""`Case.items` of examples in which no pair that is held out occurs."""


def _symmetric(points: int) -> list[Permutation]:
    return list(permutations(range(points)))


def _is_even(element: Permutation) -> bool:
    inversions = sum(element[i] > element[j] for j in range(len(element)) for i in range(j))
    return inversions % 2 == 0


GROUPS: dict[str, list[Permutation]] = {
    "S3": _symmetric(3),
    "S4": _symmetric(4),
    "A5": [element for element in _symmetric(5) if _is_even(element)],
    "S5": _symmetric(5),
    "Z60": [tuple((point + turn) % 60 for point in range(60)) for turn in range(60)],
}
"""The elements of each group by number: permutations in lexicographic order; element g of Z60 turns 60 points by g.

Element 0 is the identity."""


@cache
def multiplication_table(group: str) -> Integers:
    """`[order, order]`: entry (a, b) is the number of the product a·b, which applies `a` first and then `b`."""
    elements = GROUPS[group]
    number = {element: i for i, element in enumerate(elements)}
    table = np.array([[number[tuple(right[point] for point in left)] for right in elements] for left in elements])
    table.setflags(write=False)
    return table


@cache
def held_out_pairs(group: str, num_successors: int) -> Booleans:
    """`[order, order]`: entry (a, b) says whether b never follows a in training; it is the same in every run.

    Every element has `num_successors` successors and as many predecessors that are held out, so that all elements
    remain equally frequent at every position. The pairs do not depend on the product: rows and columns of a cyclic
    pattern are shuffled with a fixed seed.
    """
    order = len(GROUPS[group])
    rng = np.random.default_rng(0)
    pairs: Booleans = (rng.permutation(order)[:, None] + rng.permutation(order)) % order < num_successors
    pairs.setflags(write=False)
    return pairs


@dataclass(frozen=True, kw_only=True)
class GroupWords(Task):
    """The word problem of a group (Merrill et al., arXiv 2404.08819): the product of all elements at every prefix.

    Tokens are all elements of the group, independent and uniform, numbered as in `GROUPS`. The answer after token t is
    the element x₁·x₂·…·x_t, where x₁ is applied first; it is asked at every position. Every element is equally likely
    to be the answer, so chance is one over the order of the group. S5 and A5 are not solvable, and their word problems
    are complete for NC¹; Z60 has the order of A5 and is the easy one. Published results train on longer words, such as
    128 elements for DeltaProduct (Siems et al., arXiv 2502.10297); here training lengths are 2 to 32.

    With `held_out`, that share of the ordered pairs (a, b) never occurs as neighbours in training. Examples of
    `Case(length, SEEN_PAIRS_ONLY)`, which are those of training, are a Markov chain: the next token is uniform over the
    elements that may follow. Examples of `Case(length)`, which are those of tests, remain independent and uniform, so
    that unseen pairs occur at their natural rate. Both kinds exist at every length; their difference in accuracy is
    what unseen pairs cost.
    """

    family: ClassVar[str] = "groups"

    group: str
    """A key of `GROUPS`."""
    held_out: float = 0.0
    """Share of the ordered pairs of neighbours that training never shows, rounded to whole successors per element."""

    def __post_init__(self) -> None:
        if self.group not in GROUPS:
            raise ValueError(f"group is {self.group!r}: choose one of {', '.join(GROUPS)}")
        if self.held_out and not 0 < self.num_held_out < self.num_symbols:
            raise ValueError(
                f"held_out is {self.held_out}: give 0, or a share that holds out at least one and not all of "
                f"the {self.num_symbols} elements that may follow each element of {self.group}"
            )

    @property
    def num_held_out(self) -> int:
        """How many elements never follow an element in training; the same number for each."""
        return round(self.held_out * self.num_symbols)

    @property
    def num_symbols(self) -> int:
        return len(GROUPS[self.group])

    @property
    def num_classes(self) -> int:
        return self.num_symbols

    @property
    def chance(self) -> float:
        return 1 / self.num_symbols

    def token_text(self, token: int) -> str:
        """The points to which points 0, 1, … go; in Z60, by how much it turns."""
        element = GROUPS[self.group][token]
        return "".join(map(str, element)) if len(element) <= 10 else str(token)

    def answer_text(self, answer: int) -> str:
        return self.token_text(answer)

    @property
    def train_cases(self) -> Sequence[Case]:
        return [Case(length, SEEN_PAIRS_ONLY if self.held_out else 0) for length in range(2, 33)]

    @property
    def test_cases(self) -> Sequence[Case]:
        return [Case(length) for length in (16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536)]

    def sample(self, rng: Generator, batch: int, case: Case) -> Examples:
        if case.length < 1:
            raise ValueError(f"length is {case.length}: a word has at least 1 element")
        if case.items not in (0, SEEN_PAIRS_ONLY) or (case.items and not self.held_out):
            raise ValueError(f"items is {case.items}: give 0, or {SEEN_PAIRS_ONLY} where pairs are held out")
        tokens = rng.integers(self.num_symbols, size=(batch, case.length))
        if case.items == SEEN_PAIRS_ONLY:
            followed_by = np.nonzero(~held_out_pairs(self.group, self.num_held_out))[1].reshape(self.num_symbols, -1)
            choices = rng.integers(followed_by.shape[1], size=(batch, case.length - 1))
            tokens = chain(followed_by, tokens[:, 0], choices)
        products = chain(multiplication_table(self.group), tokens[:, 0], tokens[:, 1:])
        return Examples(tokens, products, np.ones(tokens.shape, dtype=bool))
