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
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from logdepth.scanning.lengths import Ints

Index = Any
"""An index array in whatever form the plan's user reads rows with (numpy here, a tensor on a device in sweep.py)."""

MAX_RUNS = 6
"""Rows in at most this many runs are read as slices; more are read through an index."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows to take from several matrices laid end to end: all of one, a few runs, or else through an index."""

    count: int
    whole: int | None
    """The matrix of which all rows are taken; None where it is not as simple."""
    runs: tuple[tuple[int, int, int], ...]
    """(source, first row, number of rows), in order; empty where an index is used."""
    index: Index | None
    """Rows of the concatenation of `sources`; None where runs are used."""
    sources: tuple[int, ...]
    """The matrices that the index reads, in order."""


@dataclass(frozen=True, slots=True)
class Level:
    """What to read at one level. Sources are named in brackets, in the order in which the rows count through them."""

    up_left: Rows
    """[stored blocks, fresh nodes] Left operands of the merges that build the next level."""
    up_right: Rows
    """[fresh nodes] Their right operands."""
    fold_left: Rows
    """[befores of the next level, edges of the next level] Prefixes that the even nodes of this level extend."""
    fold_right: Rows
    """[fresh nodes] Those even nodes."""
    before: Rows
    """[fold_left, fresh nodes, stored prefixes, folded, edges] The before of every fresh node but the heads, in order;
    at the lowest level, the edges after them."""
    blocks: Rows
    """[stored blocks, fresh nodes] The blocks of this level that the new state holds, by document."""
    prefixes: Rows
    """[stored prefixes, fresh nodes, folded] The prefixes that end with them."""
    edges: Rows
    """[edges of the next level, prefixes] The edge of every document that has one, by document."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that a scan reads, bottom level first. A plan depends on lengths alone."""

    levels: tuple[Level, ...]
    lowest: int
    """The level at which the down-sweep ends: 0, or where only edges are asked for, the one below which they stay."""
    elements: Rows
    """[elements] The fresh nodes of level 0."""
    outputs: Rows
    """[befores and edges of the lowest level] The answers, by document and then by position."""
    valid: Index | None
    """Where the answers go in the matrix of all elements; None where they fill it in order."""
    num_elements: int
    """Rows of that matrix."""
    num_stored: int
    """Blocks of the old state that the levels of this plan may read; it holds higher ones untouched."""
    nbytes: int
    """Bytes of the index arrays."""


def build_plan(
    old: Ints,
    new: Ints,
    prefixed: NDArray[np.bool_],
    starts: Ints,
    num_elements: int,
    every_prefix: bool = True,
    as_index: Callable[[Ints], Index] = lambda index: index,
) -> Plan:
    """The plan for documents that hold `old` elements and receive `new` ones, found at rows `starts` of `num_elements`.

    `old` counts within the subtree that the new elements touch; `prefixed` says which documents have elements before
    it. With `every_prefix` unset only the last prefix of each document is planned, and `outputs` are those.
    """
    make = _RowsMaker(as_index)
    total = old + new
    depth = int((old ^ total).max(initial=0)).bit_length()
    documents = np.arange(len(old))
    only_edges = not every_prefix or new.max(initial=0) <= 1
    lowest = next((level for level in range(depth) if (total >> level & 1).any()), 0) if only_edges else 0
    stored_starts = _stored_starts(old, depth)
    num_stored = stored_starts[-1]

    # The level above the top one: no nodes, no befores, and an edge for each document that had elements before.
    parent_document, parent_node = documents[:0], documents[:0]
    parent_is_head = np.zeros(0, dtype=bool)
    num_before = num_befores = 0
    edge_row = np.where(prefixed, np.cumsum(prefixed) - 1, -1)
    num_edges = int(prefixed.sum())

    levels: list[Level] = []
    for level in reversed(range(depth)):
        first, end = old >> level, total >> level
        stored_row = stored_starts[level] + np.cumsum(first & 1) - 1

        lone = (end & 1 == 1) & (end > first)
        lone_head = lone & (end == 1) & ~prefixed
        heads, others = documents[lone_head], documents[lone & ~lone_head]
        left_is_fresh = 2 * parent_node >= first[parent_document]
        lefts = np.flatnonzero(left_is_fresh)
        document = np.concatenate([heads, parent_document[lefts], others, parent_document])
        node = np.concatenate([end[heads] - 1, 2 * parent_node[lefts], end[others] - 1, 2 * parent_node + 1])
        num_fresh, num_parents = len(node), len(parent_node)
        lone_start = len(heads) + len(lefts)
        right_start = lone_start + len(others)

        up_left = stored_row[parent_document]
        up_left[lefts] = num_stored + len(heads) + np.arange(len(lefts))

        # Even nodes that are no heads extend a prefix: left children theirs of the parent, lone ones their edge.
        extend = lefts[~parent_is_head[lefts]] if every_prefix else lefts[:0]
        num_left_heads = int(parent_is_head[lefts].sum())
        fold_start = len(heads) + num_left_heads if every_prefix else lone_start
        fold_left = np.concatenate([extend - parent_is_head.sum(), num_before + edge_row[others]])
        num_folds = len(fold_left)

        # A right child's before is what its left sibling closes: a fold, a stored prefix, or a head as it stands.
        closed = num_folds + num_fresh + stored_row[parent_document]
        closed[lefts[:num_left_heads]] = num_folds + len(heads) + np.arange(num_left_heads)
        closed[extend] = num_folds + num_fresh + num_stored + np.arange(len(extend))
        before = np.concatenate([np.arange(num_folds), closed]) if every_prefix else documents[:0]

        held = np.flatnonzero(end & 1)
        block = stored_row.copy()
        block[heads] = num_stored + np.arange(len(heads))
        block[others] = num_stored + lone_start + np.arange(len(others))
        prefix = stored_row.copy()
        prefix[heads] = block[heads]
        prefix[others] = num_stored + num_fresh + len(extend) + np.arange(len(others))

        edge_row[held] = num_edges + np.arange(len(held))
        edges = edge_row[edge_row >= 0]
        if level == lowest:
            num_befores = 0 if only_edges else len(before)
            after = num_folds + num_fresh + num_stored + num_folds + np.arange(len(edges))
            before = np.concatenate([before[:num_befores], after])

        levels.append(
            Level(
                up_left=make(up_left, num_stored, num_fresh),
                up_right=make(right_start + np.arange(num_parents), num_fresh),
                fold_left=make(fold_left, num_before, num_edges),
                fold_right=make(fold_start + np.arange(num_folds), num_fresh),
                before=make(before, num_folds, num_fresh, num_stored, num_folds, len(edges)),
                blocks=make(block[held], num_stored, num_fresh),
                prefixes=make(prefix[held], num_stored, num_fresh, num_folds),
                edges=make(edges, num_edges, len(held)),
            )
        )
        parent_document, parent_node = document, node
        parent_is_head = (node == 0) & ~prefixed[document]
        num_before, num_edges = len(before), len(edges)
        edge_row = np.where(edge_row >= 0, np.cumsum(edge_row >= 0) - 1, -1)

    # Here the level whose nodes are "parents" is level 0.
    read = starts[parent_document] + parent_node - old[parent_document]
    answer_row = num_befores + edge_row
    outputs = answer_row
    if every_prefix:
        outputs = _output_rows(old, new, parent_document, parent_node, parent_is_head, answer_row)
    valid = None
    if every_prefix and len(read) < num_elements:
        valid = np.repeat(starts - np.cumsum(new) + new, new) + np.arange(len(read))
    return Plan(
        levels=tuple(reversed(levels)),
        lowest=lowest,
        elements=make(read, num_elements),
        outputs=make(outputs, num_befores + num_edges),
        valid=None if valid is None else as_index(valid),
        num_elements=num_elements,
        num_stored=num_stored,
        nbytes=make.nbytes + (0 if valid is None else valid.nbytes),
    )


def table_rows(lengths: Ints, depth: int) -> tuple[NDArray[np.bool_], Ints]:
    """Where a state keeps the block of each level (highest of `depth` first) and row: held or not, and at which row.

    Both are `[depth, rows]`. The table is ordered by level, highest first, and then by row.
    """
    levels = np.arange(depth)[::-1, None]
    held = lengths >> levels & 1 == 1
    return held, (np.cumsum(held) - 1).reshape(held.shape)


def _stored_starts(old: Ints, depth: int) -> list[int]:
    """Row of the first stored block of each level 0 … depth - 1 in the table, and last the number of them all."""
    counts = [int((old >> level & 1).sum()) for level in range(depth)]
    return [sum(counts[level + 1 :]) for level in range(depth)] + [sum(counts)]


def _output_rows(old: Ints, new: Ints, document: Ints, node: Ints, is_head: NDArray[np.bool_], edge_row: Ints) -> Ints:
    """For each new element of each document in turn, the row that holds the prefix ending with it.

    That is the before of the element that follows; for a document's last one it is the edge.
    """
    starts = np.cumsum(new) - new
    source = np.full(int(new.sum()), -1)
    source[(starts + new - 1)[new > 0]] = edge_row[new > 0]
    document, node = document[~is_head], node[~is_head]
    follows = np.flatnonzero(node > old[document])
    source[(starts[document] + node - 1 - old[document])[follows]] = follows
    return source


class _RowsMaker:
    """Turns index arrays into `Rows`, and counts the bytes that their indices take."""

    def __init__(self, as_index: Callable[[Ints], Index]) -> None:
        self.as_index = as_index
        self.nbytes = 0

    def __call__(self, index: Ints, *sizes: int) -> Rows:
        if not len(index):
            # An empty matrix at hand saves cutting one.
            return Rows(0, sizes.index(0) if 0 in sizes else None, (), None, ())
        bounds = np.cumsum(sizes)
        source = np.searchsorted(bounds, index, side="right")
        starts = np.flatnonzero((np.diff(index, prepend=-2) != 1) | (np.diff(source, prepend=-1) != 0))
        if len(starts) <= MAX_RUNS:
            first_rows = index[starts] - (bounds - sizes)[source[starts]]
            counts = np.diff(starts, append=len(index))
            runs = zip(source[starts].tolist(), first_rows.tolist(), counts.tolist(), strict=True)
            whole = int(source[0]) if len(starts) == 1 and counts[0] == sizes[source[0]] else None
            return Rows(len(index), whole, tuple(runs), None, ())
        sources = np.unique(source)
        # Matrices that nothing is read from are left out of the concatenation that the index counts through.
        unread = np.array(sizes)
        unread[sources] = 0
        skipped = np.cumsum(unread)
        self.nbytes += index.nbytes
        return Rows(len(index), None, (), self.as_index(index - skipped[source]), tuple(sources.tolist()))
