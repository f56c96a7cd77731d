"""The scan state of a batch as two tables of fixed size, which each new element changes in place.

`blocks[l]` is the block of level l where bit l of a row's length is set. `prefixes[l]` is the fold of all blocks of
level l and above: where bit l is not set, the prefix onto which a new block of level l is folded. Other entries mean
nothing.
"""

from typing import Self

import numpy as np
import torch
from torch import Tensor

from logdepth.scanning.device_index import index_on
from logdepth.scanning.lengths import Bools, Ints, Lengths
from logdepth.scanning.merge import Operator, OperatorPair, operator_pair
from logdepth.scanning.state import ScanState, table_rows
from logdepth.scanning.step import Apart, Together
from logdepth.shapes import Roots, Rows


class StaticScanState:
    """`blocks` and `prefixes`, `[levels, batch + 1, width]`. The last row of a level belongs to no row of the batch."""

    steps_differ = True

    def __init__(self, blocks: Tensor, prefixes: Tensor) -> None:
        self.blocks, self.prefixes = blocks, prefixes
        self.batch = blocks.shape[1] - 1

    @classmethod
    def of(cls, state: ScanState, levels: int | None = None) -> Self:
        """A copy of the state, with room for this many levels; by default for one more than it needs."""
        levels = state.row_lengths.longest.bit_length() + 1 if levels is None else levels
        zeros = torch.zeros(levels, len(state) + 1, state.width, dtype=state.dtype, device=state.device)
        tables = cls(zeros, zeros.clone())
        held, table = table_rows(state.row_lengths.array(), levels)
        # Below a held level, and down to the next, the prefix that ends with its block stays the last one.
        ending = np.maximum.accumulate(np.where(held, table, -1), axis=0)
        blocks, prefixes = tables._flat()
        blocks.index_copy_(0, index_on(state.device, _places(held)), state.blocks)
        source = index_on(state.device, ending[ending >= 0])
        prefixes.index_copy_(0, index_on(state.device, _places(ending >= 0)), state.prefixes.index_select(0, source))
        return tables

    @property
    def capacity(self) -> int:
        """The length up to which there is room for rows."""
        return (1 << len(self.blocks)) - 1

    def make_room(self, longest: int) -> None:
        """Moves to tables with room for rows of this length."""
        missing = longest.bit_length() - len(self.blocks)
        if missing <= 0:
            return
        more = self.blocks.new_zeros(missing + 1, *self.blocks.shape[1:])
        self.blocks, self.prefixes = torch.cat([self.blocks, more]), torch.cat([self.prefixes, more])

    def update(self, state: Self) -> None:
        assert state is self  # `advance` has changed it already

    def state(self, lengths: Ints, rows: Ints) -> ScanState:
        """The given rows as a scan would have left them; `lengths` are those of all rows."""
        levels = int(lengths[rows].max(initial=0)).bit_length()
        held, _ = table_rows(lengths[rows], levels)
        level, place = np.nonzero(held)
        index = index_on(self.blocks.device, (levels - 1 - level) * (self.batch + 1) + rows[place])
        blocks, prefixes = self._flat()
        return ScanState(Lengths.of(lengths[rows]), blocks.index_select(0, index), prefixes.index_select(0, index))

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks.dtype

    @property
    def nbytes(self) -> int:
        return self.blocks.nbytes + self.prefixes.nbytes

    def advance(
        self, operator: Operator | OperatorPair, leaves: Roots, shape: Together | Apart, index: Tensor
    ) -> Roots:
        """Absorbs one element of every row; returns the prefixes that end with them, valid until the next call."""
        up, down = operator_pair(operator)
        leaves = leaves.to(self.blocks.dtype)
        if isinstance(shape, Together):
            self._advance_together(up, down, leaves, shape)
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

    def _merged(self, operator: Operator, left: Rows, right: Rows) -> Rows:
        return operator(left, right).to(self.blocks.dtype)  # autocast must not decide what states are

    def _flat(self) -> tuple[Rows, Rows]:
        return self.blocks.flatten(0, 1), self.prefixes.flatten(0, 1)


def _places(chosen: Bools) -> Ints:
    """Rows of a flat table for the marked places of `[levels, batch]`, highest level first, in that order."""
    levels, batch = chosen.shape
    level, row = np.nonzero(chosen)
    places: Ints = (levels - 1 - level) * (batch + 1) + row
    return places
