"""The states from which a later scan, or a later tree, continues: O(log n) blocks per row.

For a row of length n a state contains one block for each set bit of n, which is a complete subtree of that size. The
state of a scan also contains the prefix that ends with that block.
"""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from logdepth.scanning.device_index import index_on
from logdepth.scanning.integers import integers
from logdepth.scanning.lengths import Bools, Ints, Lengths
from logdepth.shapes import Blocks, Roots

STATE_VERSION = 1


class TreeState:
    """The immutable blocks of a batch of sequences, with one row per sequence. Rows may have different lengths.

    The table is ordered by level, highest first, and then by row. It owns its storage. It remains part of the autograd
    graph; `detach()` removes it.
    """

    __slots__ = ("blocks", "row_lengths")
    tables: ClassVar[tuple[str, ...]] = ("blocks",)
    """The names of the tables, which are all ordered alike."""

    def __init__(self, row_lengths: Lengths, blocks: Blocks) -> None:
        """Create a state from its table. Users get states from `build_tree` and `empty` instead."""
        self.row_lengths = row_lengths
        self.blocks = blocks

    @classmethod
    def empty(
        cls, batch: int, width: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Self:
        """Create the state of `batch` rows without elements."""
        if batch < 0 or width < 0:
            raise ValueError(f"batch and width must not be negative; got {batch} and {width}")
        nothing = torch.empty(0, width, dtype=dtype, device=device)
        return cls(Lengths(batch, 0, None), *[nothing for _ in cls.tables])

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
        return sum(table.untyped_storage().nbytes() for table in self._tables())

    def __len__(self) -> int:
        return self.row_lengths.num_rows

    def __repr__(self) -> str:
        lengths = self.row_lengths.array().tolist()
        shown = f"{lengths[:8]}"[:-1] + ", …]" if len(lengths) > 8 else f"{lengths}"
        name = type(self).__name__
        return f"{name}(lengths={shown}, width={self.width}, dtype={self.dtype}, device='{self.device}')"

    def detach(self) -> Self:
        """Return the state detached from the autograd graph, for truncated back-propagation through time."""
        return self._of(self.row_lengths, [table.detach() for table in self._tables()])

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Return the state on another device or in another dtype. The arguments are those of `torch.Tensor.to`."""
        return self._of(self.row_lengths, [table.to(*args, **kwargs) for table in self._tables()])

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """Return the state of the given rows, in the given order. Rows may be repeated (beam search) or omitted."""
        chosen = integers("rows", rows)
        outside = chosen[(chosen < -len(self)) | (chosen >= len(self))]
        if outside.size:
            raise IndexError(f"row {outside[0]} is out of range for a state of {len(self)} rows")
        lengths = self.row_lengths.array()
        held, table = table_rows(lengths, self.row_lengths.longest.bit_length())
        index = index_on(self.device, table[:, chosen][held[:, chosen]])
        return self._of(Lengths.of(lengths[chosen]), [one.index_select(0, index) for one in self._tables()])

    @classmethod
    def concatenate(cls, states: Sequence[Self]) -> Self:
        """Return one state with the rows of all `states`, in order."""
        if not states:
            raise ValueError("concatenate needs at least one state")
        first = states[0]
        for state in states:
            if not isinstance(state, cls):
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
        joined = [
            torch.cat(alike).index_select(0, index) for alike in zip(*(one._tables() for one in states), strict=True)
        ]
        return cls(Lengths.of(np.concatenate(lengths)), *joined)

    def _tables(self) -> list[Blocks]:
        return [getattr(self, name) for name in self.tables]

    def _of(self, row_lengths: Lengths, tables: Sequence[Blocks]) -> Self:
        return type(self)(row_lengths, *tables)


class ScanState(TreeState):
    """The immutable state of a batch of scans, with one row per sequence. Rows may have different lengths.

    The two tables are ordered by level, highest first, and then by row. They own their storage and are not views of the
    scan's results. They remain part of the autograd graph; `detach()` removes them from it.
    """

    __slots__ = ("prefixes",)
    tables = ("blocks", "prefixes")

    def __init__(self, row_lengths: Lengths, blocks: Blocks, prefixes: Blocks) -> None:
        """Create a state from its tables. Users get states from `scan`, `empty` and `from_state_dict` instead."""
        super().__init__(row_lengths, blocks)
        self.prefixes = prefixes

    def last_prefixes(self) -> Roots:
        """Return the last prefix of each row, `[batch, width]`, from which to predict the next element."""
        empty = np.flatnonzero(self.row_lengths.array() == 0)
        if empty.size:
            raise ValueError(f"row {empty[0]} of the state is empty and has no prefix; scan at least one element first")
        return last_prefixes(self.prefixes, self.row_lengths).clone()

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


def split_table(table: Blocks, num_last: int, nothing: Blocks) -> tuple[Blocks, Blocks]:
    """Split off the last `num_last` rows of a table."""
    if not num_last:
        return table, nothing
    num_first = table.shape[0] - num_last
    return table.narrow(0, 0, num_first), table.narrow(0, num_first, num_last)


def joined_table(kept: Blocks, parts: list[Blocks], order: Tensor | None) -> Blocks:
    """Concatenate the parts of a new state's table. This always copies, so that the state owns its storage."""
    if order is not None:
        parts = [torch.cat(parts).index_select(0, order)]
    return torch.cat([kept, *parts])
