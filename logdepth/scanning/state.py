"""The state from which a later scan continues: O(log n) blocks and prefixes per row.

For a row of length n the state contains one block for each set bit of n, which is a complete subtree of that size, and
the prefix that ends with that block.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from logdepth.scanning.device_index import index_on
from logdepth.scanning.integers import integers
from logdepth.scanning.lengths import Bools, Ints, Lengths
from logdepth.shapes import Blocks, Roots

STATE_VERSION = 1


class ScanState:
    """The immutable state of a batch of scans, with one row per sequence. Rows may have different lengths.

    The two tables are ordered by level, highest first, and then by row. They own their storage and are not views of the
    scan's results. They remain part of the autograd graph; `detach()` removes them from it.
    """

    __slots__ = ("blocks", "prefixes", "row_lengths")

    def __init__(self, row_lengths: Lengths, blocks: Blocks, prefixes: Blocks) -> None:
        """Create a state from its tables. Users get states from `scan`, `empty` and `from_state_dict` instead."""
        self.row_lengths = row_lengths
        self.blocks = blocks
        self.prefixes = prefixes

    @classmethod
    def empty(
        cls, batch: int, width: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Self:
        """Create the state of `batch` rows without elements."""
        if batch < 0 or width < 0:
            raise ValueError(f"batch and width must not be negative; got {batch} and {width}")
        nothing = torch.empty(0, width, dtype=dtype, device=device)
        return cls(Lengths(batch, 0, None), nothing, nothing)

    @property
    def lengths(self) -> Tensor:
        """Number of elements that each row has absorbed: int64, on the CPU."""
        return torch.tensor(self.row_lengths.array(), device="cpu")

    @property
    def width(self) -> int:
        """Width of an element."""
        return self.blocks.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the tables."""
        return self.blocks.dtype

    @property
    def device(self) -> torch.device:
        """Device of the tables."""
        return self.blocks.device

    @property
    def nbytes(self) -> int:
        """Bytes of storage that the state occupies on its device."""
        return self.blocks.untyped_storage().nbytes() + self.prefixes.untyped_storage().nbytes()

    def __len__(self) -> int:
        return self.row_lengths.num_rows

    def __repr__(self) -> str:
        lengths = self.row_lengths.array().tolist()
        shown = f"{lengths[:8]}"[:-1] + ", …]" if len(lengths) > 8 else f"{lengths}"
        return f"ScanState(lengths={shown}, width={self.width}, dtype={self.dtype}, device='{self.device}')"

    def detach(self) -> Self:
        """Return the state detached from the autograd graph, for truncated back-propagation through time."""
        return type(self)(self.row_lengths, self.blocks.detach(), self.prefixes.detach())

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the state on another device or in another dtype. The arguments are those of `torch.Tensor.to`."""
        return type(self)(self.row_lengths, self.blocks.to(*args, **kwargs), self.prefixes.to(*args, **kwargs))

    def last_prefixes(self) -> Roots:
        """Return the last prefix of each row, `[batch, width]`, from which to predict the next element."""
        empty = np.flatnonzero(self.row_lengths.array() == 0)
        if empty.size:
            raise ValueError(f"row {empty[0]} of the state is empty and has no prefix; scan at least one element first")
        return last_prefixes(self.prefixes, self.row_lengths).clone()

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """Return the state of the given rows, in the given order. Rows may be repeated (beam search) or omitted."""
        chosen = integers("rows", rows)
        outside = chosen[(chosen < -len(self)) | (chosen >= len(self))]
        if outside.size:
            raise IndexError(f"row {outside[0]} is out of range for a state of {len(self)} rows")
        lengths = self.row_lengths.array()
        held, table = table_rows(lengths, self.row_lengths.longest.bit_length())
        index = index_on(self.device, table[:, chosen][held[:, chosen]])
        return type(self)(
            Lengths.of(lengths[chosen]), self.blocks.index_select(0, index), self.prefixes.index_select(0, index)
        )

    @classmethod
    def concatenate(cls, states: Sequence[Self]) -> Self:
        """Return one state with the rows of all `states`, in order."""
        if not states:
            raise ValueError("concatenate needs at least one state")
        first = states[0]
        for state in states:
            if not isinstance(state, ScanState):
                raise TypeError(f"concatenate takes states; got {type(state).__name__}")
            if (state.width, state.dtype, state.device) != (first.width, first.dtype, first.device):
                raise ValueError(f"states must have the same width, dtype and device; got {first} and {state}")
        lengths = [state.row_lengths.array() for state in states]
        depth = max(state.row_lengths.longest for state in states).bit_length()
        starts = np.cumsum([len(state.blocks) for state in states]) - [len(state.blocks) for state in states]
        tables = [table_rows(one, depth) for one in lengths]
        held = np.concatenate([held for held, _ in tables], axis=1)
        table = np.concatenate([start + table for start, (_, table) in zip(starts, tables, strict=True)], axis=1)
        index = index_on(first.device, table[held])
        return cls(
            Lengths.of(np.concatenate(lengths)),
            torch.cat([state.blocks for state in states]).index_select(0, index),
            torch.cat([state.prefixes for state in states]).index_select(0, index),
        )

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as named tensors, for `torch.save` or safetensors."""
        return {
            "version": torch.tensor(STATE_VERSION, device="cpu"),
            "lengths": self.lengths,
            "blocks": self.blocks.detach(),
            "prefixes": self.prefixes.detach(),
        }

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Tensor], *, width: int | None = None) -> Self:
        """Create a state from the output of `state_dict`. If `width` is given, raise a ValueError for another width."""
        missing = {"version", "lengths", "blocks", "prefixes"} - set(saved)
        if missing:
            raise ValueError(f"this is not a saved scan state: {', '.join(sorted(missing))} missing")
        version: object = saved["version"].tolist()
        if version != STATE_VERSION:
            raise ValueError(f"saved scan state has version {version}; this logdepth reads version {STATE_VERSION}")
        counts = integers("the lengths of a saved scan state", saved["lengths"])
        blocks, prefixes = saved["blocks"], saved["prefixes"]
        num_blocks = int(np.bitwise_count(counts).sum())
        if (counts < 0).any() or blocks.ndim != 2 or len(blocks) != num_blocks or prefixes.shape != blocks.shape:
            raise ValueError(
                f"saved scan state is inconsistent: lengths {counts.tolist()} need tables of {num_blocks} rows; "
                f"blocks are {tuple(blocks.shape)}, prefixes {tuple(prefixes.shape)}"
            )
        if (prefixes.dtype, prefixes.device) != (blocks.dtype, blocks.device):
            raise ValueError(
                f"saved scan state is inconsistent: blocks are {blocks.dtype} on {blocks.device}, "
                f"prefixes {prefixes.dtype} on {prefixes.device}"
            )
        if width is not None and width != blocks.shape[1]:
            raise ValueError(f"saved scan state has width {blocks.shape[1]}; expected width {width}")
        return cls(Lengths.of(counts), blocks.clone(), prefixes.clone())


def table_rows(lengths: Ints, depth: int) -> tuple[Bools, Ints]:
    """Return whether a state contains a block for each level and row, and its row in the table.

    Both arrays are `[depth, rows]`, highest level first. The table is ordered by level, highest first, and then by row.
    """
    levels = np.arange(depth)[::-1, None]
    held = lengths >> levels & 1 == 1
    return held, (np.cumsum(held) - 1).reshape(held.shape)


def last_prefixes(prefixes: Blocks, lengths: Lengths) -> Blocks:
    """Return the last prefix of each row that has one, from a table for the given lengths."""
    if lengths.common is not None:
        num_last = lengths.num_rows if lengths.common else 0
        return prefixes.narrow(0, prefixes.shape[0] - num_last, num_last)
    held, table = table_rows(lengths.array(), lengths.longest.bit_length())
    last = np.where(held, table, -1).max(axis=0)
    return prefixes.index_select(0, index_on(prefixes.device, last[last >= 0]))
