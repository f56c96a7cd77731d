"""Layout: how the tokens of one call are arranged. Blocks get it beside the tokens and their state."""

from collections.abc import Callable
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from logdepth.scanning import LengthsLike
from logdepth.scanning.integers import integers
from logdepth.scanning.lengths import Ints
from logdepth.scanning.step import AnyLength, Apart, Together


class Layout:
    """Rows of one length, rows padded on the right, or packed documents; each may continue after earlier tokens."""

    def __init__(
        self,
        shape: torch.Size,
        *,
        lengths: LengthsLike | None = None,
        cu_seqlens: LengthsLike | None = None,
        absorbed: Ints | None = None,
    ) -> None:
        """
        Args:
            shape: of the tokens: `[batch, length]`, or `[total]` with `cu_seqlens`.
            lengths: valid tokens of each row of a batch padded on the right.
            cu_seqlens: where each packed document starts, and last the total.
            absorbed: tokens that each row or document has absorbed before this call; None: none.
        """
        if lengths is not None and cu_seqlens is not None:
            raise ValueError("lengths are for a padded batch and cu_seqlens for packed documents: give one of them")
        self.shape = shape
        self.lengths: Ints | None = None if lengths is None else integers("lengths", lengths)
        self.cu_seqlens: Ints | None = None if cu_seqlens is None else integers("cu_seqlens", cu_seqlens)
        if self.cu_seqlens is not None:
            self._check_bounds(self.cu_seqlens)
        elif self.lengths is not None:
            self._check_lengths(self.lengths)
        if absorbed is not None and len(absorbed) != self.num_rows:
            raise ValueError(f"tokens have {self.num_rows} rows, but the state has {len(absorbed)}")
        self.absorbed = absorbed if absorbed is not None and absorbed.any() else None
        """Tokens that each row has absorbed before; None: no row has any."""

    @property
    def packed(self) -> bool:
        return self.cu_seqlens is not None

    @cached_property
    def num_rows(self) -> int:
        """Rows of the batch, or packed documents."""
        return self.shape[0] if self.cu_seqlens is None else len(self.cu_seqlens) - 1

    @cached_property
    def new(self) -> Ints:
        """New tokens of each row."""
        if self.cu_seqlens is not None:
            return np.diff(self.cu_seqlens)
        return np.full(self.num_rows, self.shape[1]) if self.lengths is None else self.lengths

    @cached_property
    def longest(self) -> int:
        """Columns of the new tokens as rows."""
        return int(self.new.max(initial=0)) if self.packed else self.shape[1]

    @property
    def fresh(self) -> bool:
        """Whether no row has absorbed anything before."""
        return self.absorbed is None

    @cached_property
    def lengths_after(self) -> Ints:
        """Tokens of each row after this call."""
        return self.new.copy() if self.absorbed is None else self.absorbed + self.new

    def row_positions(self, device: torch.device) -> Tensor:
        """The position of every new token, as rows: `[length]` where all rows agree, else `[rows, length]`."""
        if self.absorbed is None:
            return torch.arange(self.longest, device=device)
        return self._on("rows", device, self._row_positions)

    def positions(self, device: torch.device) -> Tensor:
        """The position of every new token in the shape of the tokens, or `[length]` where all rows agree."""
        positions = self.row_positions(device)
        if not self.packed:
            return positions
        return self.from_rows(positions.expand(self.num_rows, self.longest)[..., None])[:, 0]

    def to_rows(self, x: Tensor) -> Tensor:
        """`x` as rows `[rows, length, …]`; packed documents are padded with zeros."""
        if not self.packed:
            return x
        rows = x.new_zeros(self.num_rows * self.longest, *x.shape[1:])
        return rows.index_copy(0, self._index(x.device), x).view(self.num_rows, self.longest, *x.shape[1:])

    def from_rows(self, rows: Tensor) -> Tensor:
        """Rows `[rows, length, …]` in the shape of the tokens again."""
        return rows.flatten(0, 1).index_select(0, self._index(rows.device)) if self.packed else rows

    def latest(self, entries: Tensor, count: int) -> Tensor:
        """The last `count` entries of each row, `[rows, count, …]`: what a block keeps that remembers so many.

        `entries` holds `count` earlier ones and then the new ones, `[rows, count + length, …]`.
        """
        if self.lengths is None and not self.packed:
            return entries[:, entries.shape[1] - count :].clone()  # a view would keep all entries alive
        index = self._on("new", entries.device, lambda: torch.from_numpy(self.new))[:, None]
        index = index + torch.arange(count, device=entries.device)
        index = index.view(*index.shape, *(1,) * (entries.ndim - 2)).expand(-1, -1, *entries.shape[2:])
        return entries.gather(1, index)

    def _index(self, device: torch.device) -> Tensor:
        """Where each packed token lies among the flattened rows."""
        return self._on("index", device, self._packed_index)

    def _packed_index(self) -> Tensor:
        assert self.cu_seqlens is not None
        starts = np.repeat(np.arange(self.num_rows) * self.longest - self.cu_seqlens[:-1], self.new)
        return torch.from_numpy(starts + np.arange(self.shape[0]))

    def _row_positions(self) -> Tensor:
        assert self.absorbed is not None
        first, new = int(self.absorbed[0]), torch.arange(self.longest)
        return first + new if (self.absorbed == first).all() else torch.from_numpy(self.absorbed)[:, None] + new

    def _on(self, name: str, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """A tensor that is made once and copied to the device once."""
        kept: dict[tuple[str, torch.device], Tensor] = self.__dict__.setdefault("_kept", {})
        if (name, device) not in kept:
            kept[name, device] = make().to(device)
        return kept[name, device]

    def _check_lengths(self, lengths: Ints) -> None:
        batch, length = self.shape
        if lengths.shape != (batch,) or (lengths < 0).any() or (lengths > length).any():
            raise ValueError(f"lengths must be {batch} numbers from 0 to {length}; got {lengths.tolist()[:8]}")

    def _check_bounds(self, bounds: Ints) -> None:
        total = self.shape[0]
        if not bounds.size or bounds[0] != 0 or bounds[-1] != total or (np.diff(bounds) < 0).any():
            raise ValueError(f"cu_seqlens must rise from 0 to the {total} packed tokens; got {bounds.tolist()[:8]}")


class StepLayout(Layout):
    """One more token of every row, for static states: everything that differs between steps is in memory of its own."""

    def __init__(self, positions: Tensor, shape: Together | Apart | AnyLength, index: Tensor) -> None:
        """
        Args:
            positions: of the tokens, `[rows, 1]`, on the device.
            shape: which merges the scans of this step make.
            index: the lists of these merges where rows differ.
        """
        super().__init__(torch.Size((len(positions), 1)))
        self.static_positions, self.step, self.index = positions, shape, index

    @property
    def fresh(self) -> bool:
        return False

    def row_positions(self, device: torch.device) -> Tensor:
        del device
        return self.static_positions
