"""The state of a scan or a tree as tables of fixed size, which each new element changes in place.

`blocks[l]` is the block of level l where bit l of a row's length is set. `prefixes[l]` is the fold of all blocks of
level l and above: where bit l is not set, the prefix onto which a new block of level l is folded. Other entries mean
nothing.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from logdepth.scanning.device_index import index_on
from logdepth.scanning.lengths import Bools, Ints, Lengths
from logdepth.scanning.merge import Operator, OperatorPair, operator_pair
from logdepth.scanning.state import ScanState, TreeState, table_rows
from logdepth.scanning.step import AnyLength, Apart, Together
from logdepth.shapes import Roots, Rows


class StaticTreeState:
    """`blocks`, `[levels, batch + 1, width]`. The last row of a level belongs to no row of the batch."""

    steps_differ = True
    kind: ClassVar[type[TreeState]] = TreeState
    """The state in memory that grows; its tables are those of this one."""

    def __init__(self, blocks: Tensor) -> None:
        self.blocks = blocks
        self.batch = blocks.shape[1] - 1

    @classmethod
    def of(cls, state: Any, levels: int | None = None) -> Self:
        """A copy of the state, with room for this many levels; by default for one more than it needs."""
        levels = state.row_lengths.longest.bit_length() + 1 if levels is None else levels
        shape = (levels, len(state) + 1, state.width)
        tables = cls(*[torch.zeros(shape, dtype=state.dtype, device=state.device) for _ in cls.kind.tables])
        tables.replace(np.arange(len(state)), state)
        return tables

    def exported(self, longest: int) -> dict[str, Tensor]:
        """Its tables as tensors `[batch, levels, width]`, with room for rows of this length."""
        levels = max(1, longest.bit_length())
        missing = levels - len(self.blocks)
        tables = self.tables if missing <= 0 else [F.pad(one, (0, 0, 0, 0, 0, missing)) for one in self.tables]
        parts = [one[:levels, : self.batch].transpose(0, 1) for one in tables]
        return dict(zip(self.kind.tables, parts, strict=True))

    def on(self, exported: Mapping[str, Tensor]) -> Self:
        """Such a state on exported tables. Steps of the shape `AnyLength` are its only ones; they make new tables."""
        state = type(self)(*(exported[name].transpose(0, 1) for name in self.kind.tables))
        state.batch = state.blocks.shape[1]
        return state

    @property
    def capacity(self) -> int:
        """The length up to which there is room for rows."""
        return (1 << len(self.blocks)) - 1

    def make_room(self, longest: int) -> None:
        """Moves to tables with room for rows of this length."""
        missing = longest.bit_length() - len(self.blocks)
        if missing <= 0:
            return
        for name, table in zip(self.kind.tables, self.tables, strict=True):
            setattr(self, name, torch.cat([table, table.new_zeros(missing + 1, *table.shape[1:])]))

    def update(self, state: Self) -> None:
        assert state is self  # `advance` has changed it already

    def replace(self, rows: Ints, state: Any) -> None:
        """Puts the rows of a state, for which there is room, in place of the given rows, which all differ."""
        self._fill(rows, state, *table_rows(state.row_lengths.array(), len(self.blocks)))

    def state(self, lengths: Ints, rows: Ints) -> Any:
        """The given rows as a scan would have left them; `lengths` are those of all rows."""
        levels = int(lengths[rows].max(initial=0)).bit_length()
        held, _ = table_rows(lengths[rows], levels)
        level, place = np.nonzero(held)
        index = index_on(self.blocks.device, (levels - 1 - level) * (self.batch + 1) + rows[place])
        return self.kind(Lengths.of(lengths[rows]), *[one.flatten(0, 1).index_select(0, index) for one in self.tables])

    @property
    def tables(self) -> list[Tensor]:
        return [getattr(self, name) for name in self.kind.tables]

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks.dtype

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.tables)

    def carry(
        self,
        operator: Operator,
        elements: Rows,
        shape: Together | Apart | AnyLength,
        index: Tensor,
        tokens_as_bits: int,
    ) -> None:
        """Absorbs an element of every row whose new token completes one, without any fold.

        An element is 2^`tokens_as_bits` tokens, and `shape` is the step of one more token. So a row completes an
        element if its token carries through the lowest bits, and carries on with it through the bits above.
        """
        if isinstance(shape, AnyLength):
            completes = (shape.lengths + 1) % (1 << tokens_as_bits) == 0
            self._carry_any(operator, elements, shape.lengths >> tokens_as_bits, completes)
            return
        if isinstance(shape, Together):
            if shape.carry >= tokens_as_bits:
                for level in range(shape.carry - tokens_as_bits):
                    elements = self._merged(operator, self.blocks[level, : self.batch], elements)
                self.blocks[shape.carry - tokens_as_bits, : self.batch] = elements
            return
        lists, slots = shape.lists(index), (self.batch, *shape.merges)
        below, counts = slots[:tokens_as_bits], slots[tokens_as_bits:]
        if not counts:
            return
        made = [elements.index_select(0, lists.order[: counts[0]])]
        for level, count in enumerate(counts[1:]):
            left = self.blocks[level].index_select(0, lists.order[:count])
            made.append(self._merged(operator, left, made[-1][:count]))
        # Slots may hold rows that complete nothing: what these would write goes where nobody reads.
        source = lists.made[: counts[0]] - sum(below)
        place = (lists.held[: counts[0]] - tokens_as_bits * (self.batch + 1)).where(source >= 0, self.batch)
        self.blocks.flatten(0, 1).index_copy_(0, place, torch.cat(made).index_select(0, source.clamp(min=0)))

    def _carry_any(self, operator: Operator, block: Rows, lengths: Tensor, completes: Tensor) -> tuple[Rows, Tensor]:
        """Absorbs an element of the rows that complete one; returns their new blocks, and where these are.

        Merges run level by level as long as a row needs one.

        Args:
            operator: merges blocks.
            block: the element of each row.
            lengths: elements of each row before, a binary counter.
            completes: the rows that absorb one.

        Returns:
            The new block of each row, and whether it is of a level, `[levels, batch]`.
        """
        from torch._higher_order_ops.while_loop import while_loop  # it imports torch's compiler

        blocks, sizes = self.blocks, 2 ** torch.arange(len(self.blocks), device=lengths.device)
        lengths = lengths & (2 ** len(self.blocks) - 1)  # longer ones have no answer, and must not read beyond the end

        def goes_on(level: Tensor, needed: Tensor, block: Rows) -> Tensor:
            del level, block
            return needed.any()

        def merge(level: Tensor, needed: Tensor, block: Rows) -> tuple[Tensor, Tensor, Rows]:
            merged = self._merged(operator, blocks.index_select(0, level)[0], block)
            taken_above = lengths & (2 * sizes.index_select(0, level)) > 0
            return level + 1, needed & taken_above, torch.where(needed[:, None], merged, block)

        needed = completes & (lengths & 1 > 0)
        block = block.clone(memory_format=torch.contiguous_format)  # a loop keeps strides, also those of a single row
        first = torch.zeros_like(lengths[:1]), needed, block
        _, _, block = while_loop(goes_on, merge, first)  # type: ignore[no-untyped-call]
        added = completes & (sizes[:, None] == ~lengths & (lengths + 1))
        self.blocks = torch.where(added[..., None], block, self.blocks)
        return block, added

    def _fill(self, rows: Ints, state: Any, held: Bools, table: Ints) -> None:
        """Copies the state's tables; `held` and `table` are those of `table_rows`."""
        del table
        self.blocks.flatten(0, 1).index_copy_(0, index_on(state.device, self._places(held, rows)), state.blocks)

    def _places(self, chosen: Bools, rows: Ints) -> Ints:
        """Rows of a flat table for the marked places of `[levels, len(rows)]`, highest level first, in that order."""
        levels = len(chosen)
        level, place = np.nonzero(chosen)
        places: Ints = (levels - 1 - level) * (self.batch + 1) + rows[place]
        return places

    def _merged(self, operator: Operator, left: Rows, right: Rows) -> Rows:
        return operator(left, right).to(self.blocks.dtype)  # autocast must not decide what states are


class StaticScanState(StaticTreeState):
    """`blocks` and `prefixes`, `[levels, batch + 1, width]`. The last row of a level belongs to no row of the batch."""

    kind = ScanState

    def __init__(self, blocks: Tensor, prefixes: Tensor) -> None:
        super().__init__(blocks)
        self.prefixes = prefixes

    def advance(
        self, operator: Operator | OperatorPair, leaves: Roots, shape: Together | Apart | AnyLength, index: Tensor
    ) -> Roots:
        """Absorbs one element of every row; returns the prefixes that end with them, valid until the next call."""
        up, down = operator_pair(operator)
        leaves = leaves.to(self.blocks.dtype)
        if isinstance(shape, Together):
            self._advance_together(up, down, leaves, shape)
        elif isinstance(shape, AnyLength):
            self._advance_any(up, down, leaves, shape)
        else:
            self._advance_apart(up, down, leaves, shape, index)
        return self.prefixes[0, : self.batch]

    def _advance_together(self, up: Operator, down: Operator, leaves: Roots, shape: Together) -> None:
        block: Roots = leaves
        carry = shape.carry
        for level in range(carry):
            block = self._merged(up, self.blocks[level, : self.batch], block)
        self.blocks[carry, : self.batch] = block
        prefix = self._merged(down, self.prefixes[carry, : self.batch], block) if shape.folds else block
        self.prefixes[: carry + 1, : self.batch] = prefix

    def _advance_any(self, up: Operator, down: Operator, leaves: Roots, shape: AnyLength) -> None:
        lengths = shape.lengths
        block, added = self._carry_any(up, leaves, lengths, torch.ones_like(lengths, dtype=torch.bool))
        level = added.to(torch.int64).argmax(dim=0)
        above = self.prefixes.gather(0, level[None, :, None].expand(1, *block.shape))[0]
        folds = lengths > (lengths & ~(lengths + 1))  # as in `next_step`
        prefix = torch.where(folds[:, None], self._merged(down, above, block), block)
        levels = torch.arange(len(self.prefixes), device=lengths.device)
        self.prefixes = torch.where((levels[:, None] <= level)[..., None], prefix, self.prefixes)

    def _advance_apart(self, up: Operator, down: Operator, leaves: Roots, shape: Apart, index: Tensor) -> None:
        lists = shape.lists(index)
        made = [leaves.index_select(0, lists.order)]
        for level, count in enumerate(shape.merges):
            left = self.blocks[level].index_select(0, lists.order[:count])
            made.append(self._merged(up, left, made[-1][:count]))
        every = torch.cat(made)
        block = every.index_select(0, lists.made)
        blocks, prefixes = self._flat()
        blocks.index_copy_(0, lists.held, block)
        if shape.num_folds:
            above = prefixes.index_select(0, lists.fold_held)
            folding = block if shape.num_folds == shape.batch else every.index_select(0, lists.fold_made)
            block = torch.cat([self._merged(down, above, folding), block])
        prefixes.index_copy_(0, lists.written, block.index_select(0, lists.ending))

    def _fill(self, rows: Ints, state: Any, held: Bools, table: Ints) -> None:
        super()._fill(rows, state, held, table)
        # Below a held level, and down to the next, the prefix that ends with its block stays the last one.
        ending = np.maximum.accumulate(np.where(held, table, -1), axis=0)
        source = index_on(state.device, ending[ending >= 0])
        places = index_on(state.device, self._places(ending >= 0, rows))
        self.prefixes.flatten(0, 1).index_copy_(0, places, state.prefixes.index_select(0, source))

    def _flat(self) -> tuple[Rows, Rows]:
        return self.blocks.flatten(0, 1), self.prefixes.flatten(0, 1)
