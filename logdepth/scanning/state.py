"""What a scan leaves behind so that a later one can go on: O(log n) blocks and folded prefixes a row.

For a row of length n the state holds one block for each set bit of n (the complete subtree of that size) and beside
it the prefix that ends with that block. It knows nothing of operators or plans; it is a table and its bookkeeping.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from logdepth.scanning.lengths import Ints, Lengths
from logdepth.scanning.plan import table_rows
from logdepth.shapes import Blocks

STATE_VERSION = 1


class ScanState:
    """The state of a batch of scans, one row each; rows may stand at different lengths. Never changed in place.

    The two tables are ordered by level, highest first, and then by row. They own their storage: they are no views of
    what the scan computed. They stay attached to its graph, so that gradients can flow; `detach()` cuts them off.
    """

    __slots__ = ("blocks", "prefixes", "row_lengths")

    def __init__(self, row_lengths: Lengths, blocks: Blocks, prefixes: Blocks) -> None:
        """For `scan` and the methods below: users get a state from a scan, `empty` or `from_state_dict`."""
        self.row_lengths = row_lengths
        self.blocks = blocks
        self.prefixes = prefixes

    @classmethod
    def empty(
        cls, batch: int, width: int, *, dtype: torch.dtype | None = None, device: torch.device | str | None = None
    ) -> Self:
        """The state of `batch` rows that have seen nothing yet."""
        nothing = torch.empty(0, width, dtype=dtype, device=device)
        return cls(Lengths(batch, 0, None), nothing, nothing)

    @property
    def lengths(self) -> Tensor:
        """Elements absorbed so far by each row: int64, on the CPU."""
        return torch.tensor(self.row_lengths.array())

    @property
    def width(self) -> int:
        return self.blocks.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        return self.blocks.dtype

    @property
    def device(self) -> torch.device:
        return self.blocks.device

    @property
    def nbytes(self) -> int:
        """Bytes of storage that the state keeps alive on its device."""
        storages = {
            table.untyped_storage().data_ptr(): table.untyped_storage() for table in (self.blocks, self.prefixes)
        }
        return sum(storage.nbytes() for storage in storages.values())

    def __len__(self) -> int:
        return self.row_lengths.num_rows

    def __repr__(self) -> str:
        lengths = self.row_lengths.array().tolist()
        shown = f"{lengths[:8]}"[:-1] + ", …]" if len(lengths) > 8 else f"{lengths}"
        return f"ScanState(lengths={shown}, width={self.width}, dtype={self.dtype}, device='{self.device}')"

    def detach(self) -> Self:
        """The same state, cut from the graph: what truncated back-propagation through time passes on."""
        return type(self)(self.row_lengths, self.blocks.detach(), self.prefixes.detach())

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The state on another device or in another dtype; arguments as for `torch.Tensor.to`."""
        return type(self)(self.row_lengths, self.blocks.to(*args, **kwargs), self.prefixes.to(*args, **kwargs))

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """The state of the given rows, in the given order; a row may come twice (beams) or not at all."""
        chosen = np.asarray(rows.tolist() if isinstance(rows, Tensor) else list(rows))
        if chosen.ndim != 1 or (chosen.size and chosen.dtype.kind != "i"):
            raise TypeError(f"rows must be a flat list of integers; got {rows!r}")
        chosen = chosen.astype(np.int64)
        outside = chosen[(chosen < -len(self)) | (chosen >= len(self))]
        if outside.size:
            raise IndexError(f"row {outside[0]} is not in this state of {len(self)} rows")
        lengths = self.row_lengths.array()
        held, table = table_rows(lengths, self.row_lengths.longest.bit_length())
        return self._rearranged(Lengths.of(lengths[chosen]), table[:, chosen][held[:, chosen]])

    @classmethod
    def concatenate(cls, states: Sequence[Self]) -> Self:
        """One state with the rows of all `states`, in order."""
        if not states:
            raise ValueError("concatenate needs at least one state")
        first = states[0]
        for state in states[1:]:
            if (state.width, state.dtype, state.device) != (first.width, first.dtype, first.device):
                raise ValueError(f"states do not fit together: {first} and {state}")
        lengths = [state.row_lengths.array() for state in states]
        depth = max(state.row_lengths.longest for state in states).bit_length()
        starts = np.cumsum([0] + [len(state.blocks) for state in states])
        tables = [table_rows(one, depth) for one in lengths]
        held = np.concatenate([held for held, _ in tables], axis=1)
        table = np.concatenate([start + table for start, (_, table) in zip(starts, tables, strict=False)], axis=1)
        joined = cls(
            Lengths.of(np.concatenate(lengths)),
            torch.cat([s.blocks for s in states]),
            torch.cat([s.prefixes for s in states]),
        )
        return joined._rearranged(joined.row_lengths, table[held])

    def _rearranged(self, row_lengths: Lengths, table_index: Ints) -> Self:
        index = torch.from_numpy(table_index).to(self.device)
        return type(self)(row_lengths, self.blocks.index_select(0, index), self.prefixes.index_select(0, index))

    def state_dict(self) -> dict[str, Tensor]:
        """The state as named tensors, for `torch.save` or safetensors."""
        return {
            "version": torch.tensor(STATE_VERSION),
            "lengths": self.lengths,
            "blocks": self.blocks.detach(),
            "prefixes": self.prefixes.detach(),
        }

    @classmethod
    def from_state_dict(cls, saved: Mapping[str, Tensor], *, width: int | None = None) -> Self:
        """The state that `state_dict` wrote; with `width`, an error unless it has that width."""
        missing = {"version", "lengths", "blocks", "prefixes"} - set(saved)
        if missing:
            raise ValueError(f"not a saved scan state: {', '.join(sorted(missing))} missing")
        version = int(saved["version"])
        if version != STATE_VERSION:
            raise ValueError(f"saved scan state has version {version}; this logdepth reads version {STATE_VERSION}")
        counts = saved["lengths"].cpu().numpy().astype(np.int64)
        blocks, prefixes = saved["blocks"], saved["prefixes"]
        expected = (int(np.bitwise_count(counts).sum()), blocks.shape[-1])
        if blocks.shape != expected or prefixes.shape != expected or (counts < 0).any():
            raise ValueError(
                f"saved scan state is inconsistent: lengths {counts.tolist()} need tables of {expected[0]} rows; "
                f"blocks are {tuple(blocks.shape)}, prefixes {tuple(prefixes.shape)}"
            )
        if width is not None and width != expected[1]:
            raise ValueError(f"saved scan state has width {expected[1]}; width {width} was asked for")
        return cls(Lengths.of(counts), blocks, prefixes)
