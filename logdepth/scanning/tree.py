"""The tree without its down-sweep: `build_tree` makes the complete blocks, and `Tree.reads` says who reads them.

A scan folds the blocks of a prefix's binary decomposition into one state. Here a caller visits these blocks instead,
from the latest (smallest) to the earliest (largest), for all prefixes together: one visit per level.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from logdepth.ops.block_reading import BlockTable, ReadIndex
from logdepth.ops.dispatch import outside_compiled_graphs
from logdepth.scanning.arguments import Layout, check_state, layout_of
from logdepth.scanning.device_index import index_on
from logdepth.scanning.integers import LengthsLike, integers
from logdepth.scanning.lengths import Ints, Lengths
from logdepth.scanning.merge import Operator, checked_pair
from logdepth.scanning.plan import Plan, RowsToTake
from logdepth.scanning.plan_cache import PLANS
from logdepth.scanning.program import SelfMergingOperator, UpProgram, up_program_of
from logdepth.scanning.read_index import read_index
from logdepth.scanning.state import TreeState, joined_table, split_table, table_rows
from logdepth.scanning.sweep import new_blocks, take, up_sweep
from logdepth.shapes import Batch, Blocks, Packed, Rows

STORED, FRESH = range(2)
"""The matrices that the readers of a level read from."""
NOTHING: Ints = np.zeros(0, dtype=np.int64)


class LevelReads(NamedTuple):
    """Who reads which block of one level."""

    level: int
    readers: Tensor
    blocks: RowsToTake
    """[stored blocks of all levels, fresh nodes of this level]"""


class ReadPlan(NamedTuple):
    """The reads of some prefixes, for the levels at which any of them has a block. It depends only on lengths."""

    levels: tuple[LevelReads, ...]
    nbytes: int


class Read(NamedTuple):
    """The blocks of one level, and the prefixes whose binary decomposition contains them."""

    plan: LevelReads
    stored: Blocks
    """All blocks of the old state."""
    fresh: Rows
    """All nodes of this level with new elements."""

    @property
    def level(self) -> int:
        """The blocks cover 2^level elements."""
        return self.plan.level

    @property
    def readers(self) -> Tensor:
        """Indices of the prefixes that have a block of this level, among all that read."""
        return self.plan.readers

    @property
    def blocks(self) -> Rows:
        """The block of each of these prefixes, `[len(readers), width]`."""
        return take(self.plan.blocks, self.stored, self.fresh)


class MergedInPlace(NamedTuple):
    """The nodes of a tree whose operator has run the merges itself: rows of two tables."""

    program: UpProgram | None
    """None: there are no merges."""
    inputs: Rows
    """All elements, and all blocks of the old state."""
    results: Rows
    """Nodes of higher levels, in the order of the program."""

    def nodes(self) -> list[Rows]:
        """Return the fresh nodes of each level, in the order of the plan."""
        if self.program is None:
            return []
        leaves, *above = self.program.nodes
        higher = [self.results.index_select(0, level - self.program.num_inputs) for level in above]
        return [self.inputs.index_select(0, leaves), *higher]

    def blocks(self, program: UpProgram) -> Blocks:
        """Return the blocks of the new state."""
        few = self.inputs.index_select(0, program.block_inputs), self.results.index_select(0, program.block_results)
        return torch.cat(few).index_select(0, program.block_order)


class Tree:
    """The complete blocks of all sequences: those of an earlier state, and those of the new elements."""

    state: TreeState
    """The blocks that remain, to continue from."""

    def __init__(
        self,
        state: TreeState,
        old: Lengths,
        layout: Layout,
        plan: Plan | None,
        stored: Blocks,
        nodes: list[Rows] | MergedInPlace,
    ) -> None:
        self.state = state
        self._old, self._layout, self._plan = old, layout, plan
        self._stored, self._nodes = stored, nodes

    @outside_compiled_graphs
    def reads(self, rows: LengthsLike | None = None, prefixes: LengthsLike | None = None) -> list[Read]:
        """Return the blocks of prefixes' binary decompositions, level by level, from the latest to the earliest.

        Args:
            rows: the sequence of each prefix that reads; a sequence may be named any number of times.
            prefixes: the length of each of these prefixes, from that of the old state to the length now.

        Without arguments, the prefix that ends with each new element reads, and `readers` are rows of the matrix of all
        elements: of `elements.flatten(0, 1)`, or of packed `elements`.
        """
        chosen, key = self._chosen(rows, prefixes)
        plan = PLANS.get(("reads", *key), self._stored.device, partial(self._read_plan, chosen))
        nodes = dict(enumerate(self._nodes.nodes() if isinstance(self._nodes, MergedInPlace) else self._nodes))
        return [Read(one, self._stored, nodes.get(one.level, self._stored)) for one in plan.levels]

    @outside_compiled_graphs
    def table(self, rows: LengthsLike | None = None, prefixes: LengthsLike | None = None) -> BlockTable | None:
        """Return all blocks and the same reads as lists, for kernels; None where the operator has not made one table.

        The arguments are those of `reads`.
        """
        if not isinstance(self._nodes, MergedInPlace):
            return None
        chosen, key = self._chosen(rows, prefixes)
        program, inputs, results = self._nodes
        index = PLANS.get(("table", *key), self._stored.device, partial(self._read_index, chosen, program, len(inputs)))
        return BlockTable(inputs, results, index)

    def _chosen(
        self, rows: LengthsLike | None, prefixes: LengthsLike | None
    ) -> tuple[tuple[Ints, Ints] | None, tuple[object, ...]]:
        """Return the chosen prefixes, and the key of what depends on them."""
        if (rows is None) != (prefixes is None):
            raise ValueError("give both rows and prefixes, or neither of them")
        chosen = None
        if rows is not None and prefixes is not None:
            chosen = integers("rows", rows), integers("prefixes", prefixes)
        lengths = (self._old.key, self._layout.new.key, self._layout.row_stride)
        return chosen, (lengths, chosen and tuple(one.tobytes() for one in chosen), self._stored.device)

    def _readers(self, chosen: tuple[Ints, Ints] | None) -> tuple[Ints, Ints, Ints]:
        """Return the row and the length of each prefix that reads, and its number."""
        old, new, starts = self._old.array(), self._layout.new.array(), self._layout.starts()
        if chosen is None:
            rows = np.repeat(np.arange(len(new)), new)
            place = np.arange(len(rows)) - np.repeat(np.cumsum(new) - new, new)
            return rows, old[rows] + place + 1, starts[rows] + place
        _check_prefixes(*chosen, old, new)
        return *chosen, np.arange(len(chosen[0]))

    def _read_plan(self, chosen: tuple[Ints, Ints] | None) -> ReadPlan:
        rows, prefixes, readers = self._readers(chosen)
        node_ends = self._node_ends()
        levels = []
        for level in range(int(prefixes.max(initial=0)).bit_length()):
            reading = np.flatnonzero(prefixes >> level & 1)
            if reading.size:
                ends = node_ends[level] if level < len(node_ends) else NOTHING
                blocks = self._blocks_read(level, rows[reading], prefixes[reading], ends)
                levels.append(LevelReads(level, index_on(self._stored.device, readers[reading]), blocks))
        return ReadPlan(tuple(levels), 2 * readers.itemsize * sum(len(one.readers) for one in levels))

    def _read_index(self, chosen: tuple[Ints, Ints] | None, program: UpProgram | None, num_inputs: int) -> ReadIndex:
        rows, prefixes, readers = self._readers(chosen)
        old, starts, num_elements = self._old.array(), self._layout.starts(), self._layout.num_elements
        depth = int(prefixes.max(initial=0)).bit_length()
        _, stored_row = table_rows(old, max(depth, self._old.longest.bit_length()))
        nodes = [] if program is None else [level.cpu().numpy() for level in program.nodes]
        node_ends = self._node_ends()
        reads: list[tuple[Ints, Ints, Ints]] = [(NOTHING, NOTHING, NOTHING)]
        for level in range(depth):
            reading = np.flatnonzero(prefixes >> level & 1)
            row = rows[reading]
            last = (prefixes[reading] >> level << level) - 1 - old[row]  # as in `_blocks_read`
            fresh = last >= 0
            found = num_inputs - len(self._stored) + stored_row[-1 - level, row]
            if fresh.any():
                node = np.empty(num_elements, dtype=np.int64)
                node[node_ends[level]] = nodes[level]
                found[fresh] = node[starts[row[fresh]] + last[fresh]]
            reads.append((readers[reading], np.full(len(reading), level), found))
        reader, levels, block = (np.concatenate(parts) for parts in zip(*reads, strict=True))
        num_merges = 0 if program is None else program.num_merges
        return read_index(
            self._stored.device, reader, levels, block,
            num_readers=num_elements if chosen is None else len(rows), num_blocks=num_inputs + num_merges,
        )  # fmt: skip

    def _blocks_read(self, level: int, rows: Ints, prefixes: Ints, node_ends: Ints) -> RowsToTake:
        """Return where the latest block of this level of each prefix is, among the stored blocks or the fresh nodes."""
        old = self._old.array()
        last = (prefixes >> level << level) - 1 - old[rows]  # element of the block; negative: it is a stored block
        fresh = last >= 0
        matrices = [matrix for matrix, used in ((STORED, not fresh.all()), (FRESH, fresh.any())) if used]
        found = np.empty(len(rows), dtype=np.int64)
        if STORED in matrices:
            _, stored_row = table_rows(old, self._old.longest.bit_length())
            found[~fresh] = stored_row[-1 - level, rows[~fresh]]
        if FRESH in matrices:
            node = np.empty(self._layout.num_elements, dtype=np.int64)
            node[node_ends] = np.arange(len(node_ends))
            first = len(self._stored) if STORED in matrices else 0
            found[fresh] = first + node[self._layout.starts()[rows[fresh]] + last[fresh]]
        return RowsToTake(len(rows), None, (), index_on(self._stored.device, found), tuple(matrices))

    def _node_ends(self) -> list[Ints]:
        """Return the last element of each fresh node, in the order of the nodes, for each level.

        It is the up-sweep itself, run on the numbers of elements: whatever a plan says about order holds here too.
        """
        if self._plan is None:
            return []
        with torch.inference_mode(False):
            numbers = torch.arange(self._layout.num_elements, device=self._stored.device)[:, None]
            unread = numbers.new_zeros(self._plan.num_stored, 1)
            nodes = up_sweep(lambda _, right: right, self._plan, numbers, unread)
        return [level[:, 0].cpu().numpy() for level in nodes]


@outside_compiled_graphs
def build_tree(
    operator: Operator,
    elements: Batch | Packed,
    state: TreeState | None = None,
    *,
    lengths: LengthsLike | None = None,
    cu_seqlens: LengthsLike | None = None,
) -> Tree:
    """Build the complete blocks of all sequences: the up-sweep of a scan, without its down-sweep.

    The blocks of a prefix's binary decomposition can then be visited one by one, instead of their fold:

        for read in build_tree(operator, elements).reads():       # levels 0, 1, …: from the latest block on
            seen = carry.index_select(0, read.readers)             # of the prefixes that have a block of this level
            carry = carry.index_copy(0, read.readers, visit(read.level, seen, read.blocks))

    It takes O(log length) operator calls, fewer than `length` merges per sequence, and as many visits as levels.

    Args:
        operator: a callable or module (left, right) -> merged on `[rows, width]`, with left earlier in time.
        elements: a batch `[batch, length, width]`, or packed documents `[total, width]` with `cu_seqlens`.
        state: the state of an earlier tree of the same sequences; by default, sequences start empty.
        lengths: number of valid new elements per row, for a batch that is padded on the right.
        cu_seqlens: cumulative lengths of packed documents, `[0, n_0, n_0 + n_1, …, total]`.

    Returns:
        A tree: `reads()` are the blocks of prefixes, and `state` is what a later call continues from. The state holds
        the blocks of the binary decomposition of each sequence's length, and no prefixes.
    """
    layout = layout_of(elements, lengths, cu_seqlens)
    if state is None:
        state = TreeState.empty(layout.new.num_rows, elements.shape[-1], dtype=elements.dtype, device=elements.device)
    else:
        check_state(state, elements, layout, TreeState)
    up, _ = checked_pair(operator, elements, checkpoint=False)
    old = state.row_lengths
    own = operator.merges_with(elements) if isinstance(operator, SelfMergingOperator) else None
    if not layout.new.total:
        nothing: list[Rows] | MergedInPlace = (
            [] if own is None else MergedInPlace(None, state.blocks, state.blocks.narrow(0, 0, 0))
        )
        return Tree(state, old, layout, None, state.blocks, nothing)
    total = old.plus(layout.new)
    above, below = old.split(old.levels_touched(total))
    plan = PLANS.plan(below, above, layout, elements.device, every_prefix=False)
    flat = elements.reshape(layout.num_elements, elements.shape[-1])
    if own is not None:
        program = up_program_of(plan, len(state.blocks), elements.device)
        inputs = torch.cat([flat, state.blocks]) if len(state.blocks) else flat
        merged = MergedInPlace(program, *own(program, inputs))
        return Tree(TreeState(total, merged.blocks(program)), old, layout, plan, state.blocks, merged)
    kept, stored = split_table(state.blocks, plan.num_stored, flat.narrow(0, 0, 0))
    nodes = up_sweep(up, plan, flat, stored)
    table = joined_table(kept, new_blocks(plan, nodes, stored), plan.by_document)
    return Tree(TreeState(total, table), old, layout, plan, state.blocks, nodes)


def _check_prefixes(rows: Ints, prefixes: Ints, old: Ints, new: Ints) -> None:
    if len(rows) != len(prefixes):
        raise ValueError(f"rows and prefixes must be equally many; got {len(rows)} and {len(prefixes)}")
    outside = np.flatnonzero((rows < 0) | (rows >= len(old)))
    if outside.size:
        raise IndexError(f"row {rows[outside[0]]} is out of range for a tree of {len(old)} sequences")
    wrong = np.flatnonzero((prefixes < old[rows]) | (prefixes > (old + new)[rows]))
    if wrong.size:
        row, length = rows[wrong[0]], prefixes[wrong[0]]
        raise ValueError(
            f"sequence {row} has no prefix of length {length} here; "
            f"its state ends at {old[row]}, and its new elements at {old[row] + new[row]}"
        )
