"""Which merges one more element of every row needs, from the rows' lengths alone (numpy; tensors only as lists).

The length n of a row is a binary counter. A new element carries through the k trailing ones of n: it merges with the
blocks of levels 0 … k - 1, becomes the block of level k, and is folded onto the prefix above it, if there is one.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from logdepth.scanning.lengths import Bools, Ints

SMALLEST_BUCKET = 16
"""Fewer rows cost a GPU as much: it multiplies matrices in tiles of this many."""

NO_LISTS: Ints = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Together:
    """The shape of a step in which all rows carry equally far."""

    carry: int
    folds: bool
    """Whether there are prefixes to fold onto."""


class Lists(NamedTuple):
    """What each row does in a step in which rows differ. Rows are in *slots*, those that carry furthest first.

    Rows of a table are numbered level by level, `batch + 1` to a level; the last of a level belongs to no row.
    """

    order: Tensor
    """[batch] The row in each slot."""
    made: Tensor
    """[batch] Where its new block is, among the leaves and then the merges of each level, laid end to end."""
    held: Tensor
    """[batch] Where that goes in the table of blocks; in that of prefixes, there is the one that it extends."""
    fold_made: Tensor
    """[num_folds] `made` of those that are folded."""
    fold_held: Tensor
    """[num_folds] `held` of those that are folded."""
    ending: Tensor
    """Each slot's prefix among the folds and then the blocks, for level 0 and then for each that was carried to."""
    written: Tensor
    """Where these go in the table of prefixes."""


@dataclass(frozen=True, slots=True)
class Apart:
    """The shape of a step in which rows differ."""

    batch: int
    merges: tuple[int, ...]
    """Slots merged at each level, from the first on."""
    num_folds: int

    def lists(self, index: Tensor) -> Lists:
        """The parts of an index that `next_step` made."""
        batch, folds, writes = self.batch, self.num_folds, self.batch + sum(self.merges)
        folding = [folds, folds] if folds < batch else []
        order, made, held, *parts = torch.split(index, [batch, batch, batch, *folding, writes, writes])
        fold_made, fold_held = parts[:2] if folding else (made, held)
        return Lists(order, made, held, fold_made, fold_held, parts[-2], parts[-1])


class AnyLength(NamedTuple):
    """The shape of a step that serves rows of every length, so that a graph of it can be exported.

    Which merges are made is decided where the lengths are.
    """

    lengths: Tensor
    """[batch] The length of each row before the step."""


class Step(NamedTuple):
    """One more element of every row."""

    shape: Together | Apart
    lists: Ints
    """The index for `Apart.lists`; empty where all rows carry equally far."""
    recurs: bool
    """Whether there are few such shapes, so that a recorded step will be used again."""


def buckets(batch: int, levels: int) -> tuple[int, ...]:
    """Slots at each level that are nearly always enough: twice the rows that carry so far on average."""
    return tuple(min(batch, max(SMALLEST_BUCKET, batch >> level)) for level in range(levels))


_TOGETHER = [(Together(carry, False), Together(carry, True)) for carry in range(64)]


def together(length: int) -> Together:
    """What a new element does to rows that all have this length."""
    carry = (length & ~(length + 1)).bit_count()
    return _TOGETHER[carry][length >> carry > 0]


def next_step(lengths: Ints, *, padded: bool) -> Step:
    """What a new element does to rows of these lengths; `padded`: in one of few shapes, where rows fit the buckets."""
    alike = together(int(lengths[0]) if lengths.size else 0)
    ones = lengths & ~(lengths + 1)
    carries = np.bitwise_count(ones).astype(np.int64)
    folds = lengths > ones
    if (carries == alike.carry).all() and (folds == alike.folds).all():
        return Step(alike, NO_LISTS, True)

    batch, highest = lengths.size, int(carries.max())
    counts = batch - np.cumsum(np.bincount(carries))[:-1]  # rows that carry beyond each level
    sizes = buckets(batch, highest)
    fits = padded and bool((counts <= sizes).all())
    shape = Apart(batch, sizes, batch) if fits else Apart(batch, tuple(counts.tolist()), int(folds.sum()))
    return Step(shape, _packed(shape, carries, folds), fits)


def _packed(shape: Apart, carries: Ints, folds: Bools) -> Ints:
    """`Lists`, one after the other."""
    batch, num_folds = shape.batch, shape.num_folds
    order = np.argsort(-carries, kind="stable")
    carries, folds = carries[order], folds[order]
    slots = np.arange(batch)
    starts, levels, written_slots = _layout(batch, shape.merges)
    made = starts[carries] + slots
    held = carries * (batch + 1) + order
    folding = [made[folds], held[folds]] if num_folds < batch else []
    ending = np.where(folds, np.cumsum(folds) - 1 if folding else slots, num_folds + slots)
    written = levels * (batch + 1) + order[written_slots]
    written[carries[written_slots] < levels] = batch  # padding goes where nobody reads
    return np.concatenate([order, made, held, *folding, ending[written_slots], written])


@lru_cache(maxsize=64)
def _layout(batch: int, merges: tuple[int, ...]) -> tuple[Ints, Ints, Ints]:
    """Where the leaves and each level's merges start, laid end to end; the level and the slot of each of them."""
    counts = [batch, *merges]
    levels = np.repeat(np.arange(len(counts)), counts)
    return np.cumsum([0, *counts])[:-1], levels, np.concatenate([np.arange(count) for count in counts])
