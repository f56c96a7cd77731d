"""Index plans: which rows an operator call reads at each level of the tree. They depend only on lengths (pure NumPy).

The nodes of one level, for all documents, form one matrix, so that each level needs one operator call regardless of
the number of documents. A plan lists the rows that these calls read, and `sweep.py` executes it.

Terms, for a document with `old` absorbed and `new` additional elements, at level l, whose nodes cover 2^l elements:
- Node j covers positions j·2^l … (j+1)·2^l - 1. A *fresh* node is complete and contains a new element:
  old >> l ≤ j < (old + new) >> l. If bit l of `old` is set, the state stores node (old >> l) - 1.
- The *before* of a fresh node is the prefix of length j·2^l, which ends where the node begins. Node 0 has none. It is
  a *head*, and is its own prefix.
- A *lone* node is the last node if its number is even, so that its right sibling is incomplete. It becomes a block of
  the new state.
- The *edge* of a document is the prefix of all its complete nodes, of length ((old + new) >> l)·2^l.

The fresh nodes of a level are ordered as follows: lone heads | left children in their parents' order | other lone nodes
| right children in their parents' order. Heads come first at every level, so the operands of both sweeps are runs of
consecutive rows. If all documents have the same length and start empty, nearly every read is therefore a contiguous
slice, without a copy. Other batches read some rows through an index.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from logdepth.scanning.lengths import Bools, Ints

Index = Any
"""An index array in the form that the plan's user reads rows with: NumPy here, a device tensor in sweep.py."""

MAX_PARTS = 6
"""Maximum number of parts that are read separately. More parts are read through one index over all matrices."""


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one matrix: a consecutive range, or the rows of an index."""

    matrix: int
    start: int
    count: int
    index: Index | None


@dataclass(frozen=True, slots=True)
class RowsToTake:
    """The rows to take from several matrices: all rows of one matrix, some parts in order, or the rows of an index."""

    count: int
    """Number of rows."""
    whole: int | None
    """The matrix whose rows are all taken; None if parts or an index are used."""
    parts: tuple[Part, ...]
    """The parts to take, in order; empty if an index is used."""
    index: Index | None
    """Indices into the concatenation of the matrices in `indexed`; None if parts are used."""
    indexed: tuple[int, ...]
    """The matrices that the index reads, in order."""


# The matrices that a level can read, in this order. A read may use a prefix of this list.
STORED, FRESH, FOLDED, EXTENDED, EDGES = range(5)


@dataclass(frozen=True, slots=True)
class Level:
    """The reads of one level. Brackets list the matrices that they read from."""

    up_left: RowsToTake
    """[stored blocks, fresh] The left operands of the merges that build the next level."""
    up_right: RowsToTake
    """[fresh] The right operands of these merges."""
    extended: RowsToTake
    """[befores of the next level, edges of the next level] The prefixes that the even nodes of this level extend."""
    extending: RowsToTake
    """[fresh] These even nodes. Folding them onto `extended` gives `folded`."""
    before: RowsToTake
    """[stored prefixes, fresh, folded, extended, edges] The befores of all fresh nodes except the heads, in order,
    followed by the edges at the lowest level."""
    blocks: RowsToTake
    """[stored blocks, fresh] The blocks of this level in the new state."""
    ending: RowsToTake
    """[stored prefixes, fresh, folded] The prefixes that end with these blocks, in the same order."""
    keeps_edges: bool
    """Whether any edge of the next level is also an edge of this level. If so, all edges of the next level come first,
    followed by `ending`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All reads of a scan. A plan depends only on lengths."""

    levels: tuple[Level, ...]
    """The levels, from the bottom to the top."""
    lowest: int
    """The level at which the down-sweep ends: 0, or, if only edges are needed, the level below which they are final."""
    elements: RowsToTake
    """[elements] The fresh nodes of level 0."""
    outputs: RowsToTake
    """[befores and edges of the lowest level] The results, by document and then by position."""
    valid: Index | None
    """The rows of the matrix of all elements that the results go to; None if they fill it in order."""
    num_elements: int
    """Number of rows of the matrix of all elements."""
    num_stored: int
    """Number of blocks of the old state at the levels of this plan. Blocks of higher levels do not change."""
    by_document: Index | None
    """The permutation from the blocks of all levels, highest first, to the order of the state; None if it is the
    identity."""
    nbytes: int
    """Bytes of the index arrays."""
    derived: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Objects that users of the plan derived from it, cached as long as the plan exists."""
    derived_nbytes: dict[str, int] = field(default_factory=dict, compare=False, repr=False)
    """Bytes of the derived objects."""


def build_plan(
    old: Ints,
    new: Ints,
    prefixed: Bools,
    starts: Ints,
    num_elements: int,
    every_prefix: bool,
    as_index: Callable[[Ints], Index],
) -> Plan:
    """Build the plan for documents that have absorbed `old` elements and receive `new` ones, at least one in total.

    Args:
        old: absorbed elements per document, counted within the subtree that the new elements change.
        new: new elements per document.
        prefixed: whether each document has elements before that subtree.
        starts: row of each document's first new element.
        num_elements: number of rows of the matrix of all elements.
        every_prefix: plan all prefixes; if False, only the last prefix of each document.
        as_index: converts an index array to the form that the plan's user reads rows with.
    """
    make = _RowsMaker(as_index)
    total = old + new
    depth = int((old ^ total).max()).bit_length()
    only_edges = not every_prefix or new.max() <= 1
    lowest = next(level for level in range(depth) if (total >> level & 1).any()) if only_edges else 0
    stored_starts = _stored_starts(old, depth)
    num_stored = stored_starts[-1]

    # Start above the top level: no nodes, no befores, and an edge for each document with elements before the subtree.
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

        # Even nodes that are not heads extend a prefix: left children their parent's before, lone nodes their edge.
        left_heads = parents.is_head[nodes.lefts]
        lefts = nodes.lefts[~left_heads] if every_prefix else nodes.lefts[:0]
        before_row = np.cumsum(~parents.is_head) - 1
        extended = np.concatenate([_at(0, before_row[lefts]), _at(1, edge_row[nodes.lone])])
        extending = nodes.right_start - len(extended) + np.arange(len(extended))

        # A right child's before ends with its left sibling: a fold, a stored prefix, or a head itself.
        closed = _at(STORED, stored_row[parents.document])
        closed[nodes.lefts[left_heads]] = _at(FRESH, left_row[left_heads])
        closed[lefts] = _at(FOLDED, np.arange(len(lefts)))
        before = np.concatenate([_at(EXTENDED, np.arange(len(extended))), closed])

        # The blocks of this level in the new state: lone nodes, and stored blocks that remain.
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
    """The fresh nodes of one level in the order of their matrix: lone heads | lefts | other lone nodes | rights."""

    document: Ints
    """The document of each node."""
    node: Ints
    """The number of each node within its document."""
    is_head: Bools
    """Whether each node is node 0 of a document without earlier elements."""
    lone_heads: Ints
    """The documents whose only fresh node is a lone head."""
    lefts: Ints
    """The parents with a fresh left child, by their row in the next level. The right child of every parent is fresh."""
    lone: Ints
    """The documents with a lone node that is not a head."""

    @classmethod
    def none(cls) -> "_Nodes":
        """Create a level without nodes."""
        nothing = np.zeros(0, dtype=np.int64)
        return cls(nothing, nothing, nothing > 0, nothing, nothing, nothing)

    @classmethod
    def below(cls, parents: "_Nodes", first: Ints, end: Ints, prefixed: Bools) -> "_Nodes":
        """Create the level below `parents`, in which each document has the fresh nodes first … end - 1."""
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
    """Return the table row of the first stored block of each level 0 … depth - 1, followed by the number of blocks."""
    counts = [int((old >> level & 1).sum()) for level in range(depth)]
    return [sum(counts[level + 1 :]) for level in range(depth)] + [sum(counts)]


def _output_rows(old: Ints, new: Ints, nodes: _Nodes, last_row: Ints) -> Ints:
    """Return, for each new element of each document in order, the row of the prefix that ends with it.

    This prefix is the before of the following element. For a document's last element it is the edge, at `last_row`.
    """
    starts = np.cumsum(new) - new
    source = np.empty(int(new.sum()), dtype=np.int64)
    source[(starts + new - 1)[new > 0]] = last_row[new > 0]
    document, node = nodes.document[~nodes.is_head], nodes.node[~nodes.is_head]
    follows = np.flatnonzero(node > old[document])
    source[(starts[document] + node - 1 - old[document])[follows]] = follows
    return source


def _ranges(starts: Ints, counts: Ints) -> Ints:
    """Return the concatenation of the ranges start, …, start + count - 1."""
    return np.repeat(starts - np.cumsum(counts) + counts, counts) + np.arange(counts.sum())


_MATRIX_BITS = 40


def _at(matrix: int, rows: Ints) -> Ints:
    """Encode rows of a matrix, with the matrix in the high bits. Consecutive rows have consecutive codes."""
    return rows + (matrix << _MATRIX_BITS)


def _cuts(values: Ints, step: int) -> list[int]:
    """Return the starts of runs of values that increase by `step`, followed by the end of the last run."""
    return [0, *(np.flatnonzero(np.diff(values) != step) + 1).tolist(), len(values)]


class _RowsMaker:
    """Converts rows encoded by `_at` to `RowsToTake`, and counts the bytes of their indices."""

    def __init__(self, as_index: Callable[[Ints], Index]) -> None:
        self.as_index = as_index
        self.nbytes = 0

    def __call__(self, rows: Ints, *sizes: int) -> RowsToTake:
        """Convert encoded rows. `sizes` are the numbers of rows of the matrices."""
        if not len(rows):
            # Taking all rows of an empty matrix avoids a slice.
            return RowsToTake(0, sizes.index(0) if 0 in sizes else None, (), None, ())
        matrix, row = rows >> _MATRIX_BITS, rows & ((1 << _MATRIX_BITS) - 1)
        for cuts in (_cuts(rows, 1), _cuts(matrix, 0)):  # one part per run, or else one part per matrix
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
        """Convert an index array with `as_index`, and count its bytes."""
        self.nbytes += rows.nbytes
        return self.as_index(rows)
