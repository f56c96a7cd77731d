"""Index plans: which row meets which at each level of the tree, decided from lengths alone (numpy, no tensors).

The tree of every document is laid out level by level, all documents of a level in one matrix, so that a level is
one operator call whatever the number of documents. A plan says which rows those calls read. `sweep.py` obeys it.

Words, for one document with `old` elements already absorbed and `new` ones to come, at level l (nodes of 2^l):
- node j covers positions j·2^l … (j+1)·2^l - 1. The *fresh* nodes are those that hold a new element and are
  complete: old >> l ≤ j < (old + new) >> l. Bit l of `old` set means that the state stores node (old >> l) - 1.
- a fresh node's *before* is the state of everything ahead of it, the prefix of length j·2^l. Node 0 has none: it is
  a *head*, and stands as its own prefix.
- a *lone* node is the last, even one, whose right sibling is not complete yet: a block of the state to come.
- the document's *edge* is the prefix of all its complete nodes, of length ((old + new) >> l)·2^l.

The order of fresh nodes in a level's matrix makes nearly every read a contiguous slice (no copy) when all documents
have one length and start empty: lone heads | left children in their parents' order | other lone nodes | right
children in their parents' order. Heads stay in front at every level, so both the operands of the up-sweep and those
of the down-sweep are runs of consecutive rows. Other batches read some rows through an index.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from logdepth.scanning.lengths import Bools, Ints

Index = Any
"""An index array in whatever form the plan's user reads rows with (numpy here, a tensor on a device in sweep.py)."""

MAX_PARTS = 6
"""Rows in at most this many parts are read part by part; more, through one index over all the matrices."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one matrix: consecutive ones, or through an index."""

    matrix: int
    start: int
    count: int
    index: Index | None


@dataclass(frozen=True, slots=True)
class RowsToTake:
    """Which rows to take from several matrices: all of one, or some parts in order, or any through an index."""

    count: int
    whole: int | None
    """The matrix of which all rows are taken; None where it is not as simple."""
    parts: tuple[Part, ...]
    """What is taken, in order; empty where an index is used."""
    index: Index | None
    """Rows of the matrices in `indexed`, laid end to end; None where parts are used."""
    indexed: tuple[int, ...]
    """The matrices that the index reads, in order."""


# The matrices that a level reads, as far as a read goes, in this order.
STORED, FRESH, FOLDED, EXTENDED, EDGES = range(5)


@dataclass(frozen=True, slots=True)
class Level:
    """What to read at one level; in brackets, from which matrices."""

    up_left: RowsToTake
    """[stored blocks, fresh] Left operands of the merges that build the next level."""
    up_right: RowsToTake
    """[fresh] Their right operands."""
    extended: RowsToTake
    """[befores of the next level, edges of the next level] The prefixes that the even nodes of this level extend."""
    extending: RowsToTake
    """[fresh] Those even nodes. The folds of the two are `folded`."""
    before: RowsToTake
    """[stored prefixes, fresh, folded, extended, edges] The before of every fresh node but the heads, in order; at the
    lowest level, the edges after them."""
    blocks: RowsToTake
    """[stored blocks, fresh] The blocks of this level that the new state holds."""
    ending: RowsToTake
    """[stored prefixes, fresh, folded] The prefixes that end with them, in the same order."""
    keeps_edges: bool
    """Whether an edge of the next level is one here too: then all of those come first, and `ending` after them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a scan reads, bottom level first. A plan depends on lengths alone."""

    levels: tuple[Level, ...]
    lowest: int
    """The level at which the down-sweep ends: 0, or where only edges are asked for, the one below which they stay."""
    elements: RowsToTake
    """[elements] The fresh nodes of level 0."""
    outputs: RowsToTake
    """[befores and edges of the lowest level] The answers, by document and then by position."""
    valid: Index | None
    """Where the answers go in the matrix of all elements; None where they fill it in order."""
    num_elements: int
    """Rows of that matrix."""
    num_stored: int
    """Blocks of the old state that the levels of this plan may read; it holds higher ones untouched."""
    by_document: Index | None
    """The order that brings the blocks of all levels, highest first, into the state's; None where they have it."""
    nbytes: int
    """Bytes of the index arrays."""
    derived: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """What users of the plan worked out from it, to be found again as long as the plan is."""
    derived_nbytes: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    """Bytes of that."""


def build_plan(
    old: Ints,
    new: Ints,
    prefixed: Bools,
    starts: Ints,
    num_elements: int,
    every_prefix: bool,
    as_index: Callable[[Ints], Index],
) -> Plan:
    """The plan for documents that hold `old` elements and receive `new` ones, found at rows `starts` of `num_elements`.

    There is at least one new element. `old` counts within the subtree that the new elements touch; `prefixed` says
    which documents have elements before it. With `every_prefix` unset only the last prefix of each document is planned,
    and `outputs` are those. `as_index` turns an index array into what the plan's user reads rows with.
    """
    make = _RowsMaker(as_index)
    total = old + new
    depth = int((old ^ total).max()).bit_length()
    only_edges = not every_prefix or new.max() <= 1
    lowest = next(level for level in range(depth) if (total >> level & 1).any()) if only_edges else 0
    stored_starts = _stored_starts(old, depth)
    num_stored = stored_starts[-1]

    # The level above the top one: no nodes, no befores, and an edge for each document that had elements before.
    nodes = _Nodes.none()
    num_before = num_answers = num_held = 0
    edge_row = np.where(prefixed, np.cumsum(prefixed) - 1, -1)
    num_edges = int(prefixed.sum())

    levels: list[Level] = []
    orders: list[Ints] = []
    for level in reversed(range(depth)):
        first, end = old >> level, total >> level
        stored_row = stored_starts[level] + np.cumsum(first & 1) - 1
        parents, nodes = nodes, _Nodes.below(nodes, first, end, prefixed)
        lone_row = nodes.lone_start + np.arange(len(nodes.lone))
        left_row = len(nodes.lone_heads) + np.arange(len(nodes.lefts))

        up_left = _at(STORED, stored_row[parents.document])
        up_left[nodes.lefts] = _at(FRESH, left_row)

        # Even nodes that are no heads extend a prefix: left children their parent's before, lone ones their edge.
        left_heads = parents.is_head[nodes.lefts]
        lefts = nodes.lefts[~left_heads] if every_prefix else nodes.lefts[:0]
        before_row = np.cumsum(~parents.is_head) - 1
        extended = np.concatenate([_at(0, before_row[lefts]), _at(1, edge_row[nodes.lone])])
        extending = nodes.right_start - len(extended) + np.arange(len(extended))

        # A right child's before is what its left sibling closes: a fold, a stored prefix, or a head as it stands.
        closed = _at(STORED, stored_row[parents.document])
        closed[nodes.lefts[left_heads]] = _at(FRESH, left_row[left_heads])
        closed[lefts] = _at(FOLDED, np.arange(len(lefts)))
        before = np.concatenate([_at(EXTENDED, np.arange(len(extended))), closed])

        # What the state keeps of this level: lone nodes, and blocks that it had and that are lone still.
        unchanged = np.flatnonzero((end & 1 == 1) & (end == first))
        holders = np.concatenate([nodes.lone_heads, nodes.lone, unchanged])
        head_row = np.arange(len(nodes.lone_heads))
        blocks = [_at(FRESH, head_row), _at(FRESH, lone_row), _at(STORED, stored_row[unchanged])]
        lone_folds = len(lefts) + np.arange(len(nodes.lone))
        ending = [_at(FRESH, head_row), _at(FOLDED, lone_folds), _at(STORED, stored_row[unchanged])]
        orders.append(num_held + np.argsort(holders))
        num_held += len(holders)

        num_edges_above = num_edges
        edge_row[holders] = -1
        keeps_edges = bool((edge_row >= 0).any())
        num_kept_edges = num_edges if keeps_edges else 0
        edge_row[holders] = num_kept_edges + np.arange(len(holders))
        num_edges = num_kept_edges + len(holders)
        if only_edges:
            before = before[:0]
        if level == lowest:
            num_answers = len(before) + num_edges
            before = np.concatenate([before, _at(EDGES, np.arange(num_edges))])

        levels.append(
            Level(
                up_left=make(up_left, num_stored, len(nodes)),
                up_right=make(nodes.right_start + np.arange(len(parents)), len(nodes)),
                extended=make(extended, num_before, num_edges_above),
                extending=make(extending, len(nodes)),
                before=make(before, num_stored, len(nodes), len(extended), len(extended), num_edges),
                blocks=make(np.concatenate(blocks), num_stored, len(nodes)),
                ending=make(np.concatenate(ending), num_stored, len(nodes), len(extended)),
                keeps_edges=keeps_edges,
            )
        )
        num_before = len(before)

    last_row = num_answers - num_edges + edge_row
    order = np.concatenate(orders)
    return Plan(
        levels=tuple(reversed(levels)),
        lowest=lowest,
        elements=make(starts[nodes.document] + nodes.node - old[nodes.document], num_elements),
        outputs=make(_output_rows(old, new, nodes, last_row) if every_prefix else last_row, num_answers),
        valid=make.index(_ranges(starts, new)) if every_prefix and len(nodes) < num_elements else None,
        num_elements=num_elements,
        num_stored=num_stored,
        by_document=make.index(order) if (np.diff(order) < 0).any() else None,
        nbytes=make.nbytes,
    )


@dataclass(frozen=True, slots=True)
class _Nodes:
    """The fresh nodes of one level in the order of their matrix: lone heads | lefts | other lone ones | rights."""

    document: Ints
    node: Ints
    is_head: Bools
    """Whether each is node 0 of a document that starts here."""
    lone_heads: Ints
    """Documents whose only fresh node is a lone head."""
    lefts: Ints
    """Parents whose left child is fresh, by their row in the next level; every parent's right child is."""
    lone: Ints
    """Documents with another lone node."""

    @classmethod
    def none(cls) -> "_Nodes":
        nothing = np.zeros(0, dtype=np.int64)
        return cls(nothing, nothing, nothing > 0, nothing, nothing, nothing)

    @classmethod
    def below(cls, parents: "_Nodes", first: Ints, end: Ints, prefixed: Bools) -> "_Nodes":
        """The level below `parents`, in which documents have the fresh nodes first … end - 1."""
        is_lone = (end & 1 == 1) & (end > first)
        is_lone_head = is_lone & (end == 1) & ~prefixed
        lone_heads, lone = np.flatnonzero(is_lone_head), np.flatnonzero(is_lone & ~is_lone_head)
        lefts = np.flatnonzero(2 * parents.node >= first[parents.document])
        document = np.concatenate([lone_heads, parents.document[lefts], lone, parents.document])
        node = np.concatenate([end[lone_heads] - 1, 2 * parents.node[lefts], end[lone] - 1, 2 * parents.node + 1])
        return cls(document, node, (node == 0) & ~prefixed[document], lone_heads, lefts, lone)

    def __len__(self) -> int:
        return len(self.node)

    @property
    def lone_start(self) -> int:
        return len(self.lone_heads) + len(self.lefts)

    @property
    def right_start(self) -> int:
        return self.lone_start + len(self.lone)


def _stored_starts(old: Ints, depth: int) -> list[int]:
    """Row of the first stored block of each level 0 … depth - 1 in the table, and last the number of them all."""
    counts = [int((old >> level & 1).sum()) for level in range(depth)]
    return [sum(counts[level + 1 :]) for level in range(depth)] + [sum(counts)]


def _output_rows(old: Ints, new: Ints, nodes: _Nodes, last_row: Ints) -> Ints:
    """For each new element of each document in turn, the row that holds the prefix ending with it.

    That is the before of the element that follows; for a document's last one it is the edge, at `last_row`.
    """
    starts = np.cumsum(new) - new
    source = np.empty(int(new.sum()), dtype=np.int64)
    source[(starts + new - 1)[new > 0]] = last_row[new > 0]
    document, node = nodes.document[~nodes.is_head], nodes.node[~nodes.is_head]
    follows = np.flatnonzero(node > old[document])
    source[(starts[document] + node - 1 - old[document])[follows]] = follows
    return source


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """start, start + 1, … of each range, one after the other."""
    return np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())


_MATRIX_BITS = 40


def _at(matrix: int, rows: Ints) -> Ints:
    """Rows of a matrix, told from those of the others by their high bits. Neighbours stay neighbours."""
    return rows + (matrix << _MATRIX_BITS)


def _cuts(values: Ints, step: int) -> list[int]:
    """Where runs of values that grow by `step` start, and where the last one ends."""
    return [0, *(np.flatnonzero(np.diff(values) != step) + 1).tolist(), len(values)]


class _RowsMaker:
    """Turns rows written by `_at` into `RowsToTake`, and counts the bytes that their indices take."""

    def __init__(self, as_index: Callable[[Ints], Index]) -> None:
        self.as_index = as_index
        self.nbytes = 0

    def __call__(self, rows: Ints, *sizes: int) -> RowsToTake:
        """`sizes` are the numbers of rows of the matrices."""
        if not len(rows):
            # An empty matrix at hand saves cutting one.
            return RowsToTake(0, sizes.index(0) if 0 in sizes else None, (), None, ())
        matrix, row = rows >> _MATRIX_BITS, rows & ((1 << _MATRIX_BITS) - 1)
        for cuts in (_cuts(rows, 1), _cuts(matrix, 0)):  # a part a run, or else a part a matrix
            if len(cuts) <= MAX_PARTS + 1:
                parts = tuple(self._part(int(matrix[start]), row[start:stop]) for start, stop in pairwise(cuts))
                only = parts[0] if len(parts) == 1 and parts[0].index is None else None
                whole = only.matrix if only is not None and only.count == sizes[only.matrix] else None
                return RowsToTake(len(rows), whole, parts, None, ())
        indexed = np.unique(matrix)
        read_starts = np.zeros(len(sizes), dtype=np.int64)
        read_sizes = np.array(sizes)[indexed]
        read_starts[indexed] = np.cumsum(read_sizes) - read_sizes
        return RowsToTake(len(rows), None, (), self.index(read_starts[matrix] + row), tuple(indexed.tolist()))

    def _part(self, matrix: int, row: Ints) -> Part:
        if (np.diff(row) == 1).all():
            return Part(matrix, int(row[0]), len(row), None)
        return Part(matrix, 0, len(row), self.index(row))

    def index(self, rows: Ints) -> Index:
        self.nbytes += rows.nbytes
        return self.as_index(rows)
