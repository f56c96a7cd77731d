"""Check the arguments of `scan` and `reduce`, and convert both layouts to lengths on the host."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from logdepth.scanning.integers import LengthsLike, integers
from logdepth.scanning.lengths import Ints, Lengths
from logdepth.scanning.state import ScanState, TreeState


class Layout(NamedTuple):
    """The position of each sequence's new elements in the matrix of all elements."""

    new: Lengths
    """Number of new elements of each row (of a batch) or document (of packed documents)."""
    row_stride: int | None
    """Number of elements from one row's start to the next in a batch; None for packed documents."""
    num_elements: int
    """Number of rows of the matrix of all elements, including padding."""

    def starts(self) -> Ints:
        """Return the index of each sequence's first element in the matrix."""
        if self.row_stride is None:
            return np.cumsum(self.new.array()) - self.new.array()
        return np.arange(self.new.num_rows) * self.row_stride


def refuse_traced_sizes(shape: torch.Size) -> None:
    """Raise a NotImplementedError if the sizes of a shape are not numbers, as within a trace or a dynamic export."""
    if not all(type(size) is int for size in shape):  # a Tensor in a trace, a SymInt in an export
        raise NotImplementedError(
            "torch.jit.trace, and torch.export with dynamic shapes, do not support scans, because a scan's merges "
            "depend on the length; use torch.export with fixed shapes, once for each length, or the model itself"
        )


def layout_of(elements: Tensor, lengths: LengthsLike | None, cu_seqlens: LengthsLike | None) -> Layout:
    """Check the arguments and return their layout."""
    if not isinstance(elements, Tensor):
        raise TypeError(f"elements must be a tensor; got {type(elements).__name__}")
    refuse_traced_sizes(elements.shape)
    if lengths is not None and cu_seqlens is not None:
        raise ValueError("lengths are for a padded batch and cu_seqlens for packed documents; give only one of them")
    if cu_seqlens is not None:
        return _packed_layout(elements, integers("cu_seqlens", cu_seqlens))
    if elements.ndim != 3:
        hint = " (one element per row is [batch, 1, width]; packed documents need cu_seqlens)" * (elements.ndim == 2)
        raise ValueError(f"elements must be [batch, length, width]; got shape {tuple(elements.shape)}{hint}")
    batch, length, _ = elements.shape
    if lengths is None:
        return Layout(Lengths(batch, length, None), length, batch * length)
    new = integers("lengths", lengths)
    if len(new) != batch:
        raise ValueError(f"lengths must have one entry for each of the {batch} rows; got {len(new)}")
    wrong = np.flatnonzero((new < 0) | (new > length))
    if wrong.size:
        raise ValueError(
            f"lengths[{wrong[0]}] = {new[wrong[0]]} is outside 0 … {length}, the length of elements; "
            "lengths count only new elements"
        )
    return Layout(Lengths.of(new), length, batch * length)


def check_state(state: TreeState, elements: Tensor, layout: Layout, kind: type[TreeState] = ScanState) -> None:
    """Raise an error if a state cannot be continued with these elements."""
    if not isinstance(state, kind):
        expected = f"a {kind.__name__}, as an earlier {'scan' if kind is ScanState else 'tree'} returned it"
        raise TypeError(f"state must be {expected}; got {type(state).__name__}")
    if len(state) != layout.new.num_rows:
        what = "documents" if layout.row_stride is None else "rows of the batch"
        raise ValueError(f"state has {len(state)} rows, but there are {layout.new.num_rows} {what}")
    if state.width != elements.shape[-1]:
        raise ValueError(f"state has width {state.width}, but elements have width {elements.shape[-1]}")
    if state.dtype != elements.dtype:
        raise ValueError(f"state has dtype {state.dtype}, but elements have dtype {elements.dtype}")
    if state.device != elements.device:
        raise ValueError(f"state is on {state.device}, but elements are on {elements.device}")


def _packed_layout(elements: Tensor, bounds: Ints) -> Layout:
    if elements.ndim != 2:
        raise ValueError(f"with cu_seqlens, elements must be packed [total, width]; got shape {tuple(elements.shape)}")
    total = len(elements)
    if not bounds.size or bounds[0] != 0 or bounds[-1] != total:
        ends = f"{bounds[0]} … {bounds[-1]}" if bounds.size else "nothing"
        raise ValueError(f"cu_seqlens must run from 0 to {total}, the number of packed elements; it runs {ends}")
    new = np.diff(bounds)
    wrong = np.flatnonzero(new < 0)
    if wrong.size:
        at = wrong[0]
        raise ValueError(
            f"cu_seqlens must not decrease: entry {at} is {bounds[at]}, entry {at + 1} is {bounds[at + 1]}"
        )
    return Layout(Lengths.of(new), None, total)
