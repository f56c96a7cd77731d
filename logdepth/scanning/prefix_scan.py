"""`scan` and `reduce`: the public functions. They check arguments, find the plan, and run the sweeps."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from logdepth.scanning.arguments import Layout, LengthsLike, check_state, layout_of
from logdepth.scanning.merge import Operator, OperatorPair, checked_pair
from logdepth.scanning.plan import Ints, Plan, num_levels, table_rows
from logdepth.scanning.plan_cache import PLANS
from logdepth.scanning.state import ScanState
from logdepth.scanning.sweep import sweep
from logdepth.shapes import Batch, Blocks, Packed, Roots, Rows


class ScanResult(NamedTuple):
    """Every prefix, in the layout of the elements, and the state from which a later scan continues."""

    prefixes: Tensor
    state: ScanState


def scan(
    operator: Operator | OperatorPair,
    elements: Batch | Packed,
    state: ScanState | None = None,
    *,
    lengths: LengthsLike | None = None,
    cu_seqlens: LengthsLike | None = None,
    checkpoint: bool = False,
) -> ScanResult:
    """The state of every prefix of every sequence, in O(log length) operator calls and < 2 · length rows a sequence.

    Args:
        operator: (left, right) -> merged on `[rows, width]`, left earlier in time; any callable or module, which need
            not be associative. Or a pair (up, down): `up` merges blocks, `down` folds a block onto a prefix.
        elements: `[batch, length, width]`, or with `cu_seqlens` packed documents `[total, width]`.
        state: where earlier scans of the same rows ended; None means that they start here.
        lengths: how many of each row's new elements are valid, in a batch padded on the right. What lies beyond never
            reaches the operator; its prefixes are zeros.
        cu_seqlens: where each packed document starts, and last the total: `[0, n_0, n_0 + n_1, …]`. With `state`,
            one state row a document.
        checkpoint: recompute merges in the backward pass instead of storing what they need: less memory, more time.

    Returns:
        `prefixes`, shaped as `elements`: position i holds the state of everything up to and including element i, the
        state from which to predict element i + 1; and the `state` at the end of each row.

    Lengths decide the shape of the computation, so they must be known on the host: `lengths` or `cu_seqlens` on a GPU
    are copied back first. Without them, and from a state whose rows stand at one length, nothing synchronises.
    """
    layout = layout_of(elements, lengths, cu_seqlens)
    if state is not None:
        check_state(state, elements, layout)
    pair = checked_pair(operator, elements.device, checkpoint)
    if not layout.num_new:
        prefixes = elements.new_zeros(elements.shape)
        return ScanResult(prefixes, state if state is not None else _empty_state(layout, elements))

    old = state.counts if state is not None else np.zeros_like(layout.new)
    depth = num_levels(old, layout.new)
    above = old >> depth
    plan = PLANS.plan(old & ((1 << depth) - 1), layout, above > 0, elements.device)
    flat = elements.reshape(-1, elements.shape[-1])
    if state is None:
        nothing = flat[:0]
        kept = kept_prefixes = nothing
        swept = sweep(plan, pair, flat, nothing, nothing, nothing)
    else:
        # Levels that the new elements do not touch come first in the tables, and stay as they are.
        sizes = [len(state.blocks) - plan.num_stored, plan.num_stored]
        kept, stored = state.blocks.split(sizes)
        kept_prefixes, stored_prefixes = state.prefixes.split(sizes)
        swept = sweep(plan, pair, flat, stored, stored_prefixes, _last_prefixes(kept_prefixes, above))
    # Concatenation copies, also where there is one part: the state owns its storage.
    blocks, prefixes = torch.cat([kept, *swept.blocks]), torch.cat([kept_prefixes, *swept.prefixes])
    return ScanResult(_in_layout(swept.outputs, plan, elements), ScanState(old + layout.new, blocks, prefixes))


def reduce(
    operator: Operator | OperatorPair,
    elements: Batch | Packed,
    *,
    lengths: LengthsLike | None = None,
    cu_seqlens: LengthsLike | None = None,
) -> Roots:
    """The last prefix of every sequence, `[batch, width]`: the up-sweep and one fold, fewer than `length` merges a row.

    It equals `scan(...).prefixes` at each row's last valid position, at about half the cost. Arguments as for `scan`.
    """
    layout = layout_of(elements, lengths, cu_seqlens)
    empty = np.flatnonzero(layout.new == 0)
    if empty.size:
        what = "document" if layout.row_stride is None else "row"
        raise ValueError(f"cannot reduce {what} {empty[0]}: it has no elements, and there is no identity to return")
    pair = checked_pair(operator, elements.device, checkpoint=False)
    flat = elements.reshape(-1, elements.shape[-1])
    nothing = flat[:0]
    if not layout.num_new:
        return nothing
    zeros = np.zeros_like(layout.new)
    plan = PLANS.plan(zeros, layout, zeros > 0, elements.device, every_prefix=False)
    return sweep(plan, pair, flat, nothing, nothing, nothing).outputs


def _empty_state(layout: Layout, elements: Tensor) -> ScanState:
    return ScanState.empty(len(layout.new), elements.shape[-1], dtype=elements.dtype, device=elements.device)


def _last_prefixes(prefixes: Blocks, counts: Ints) -> Blocks:
    """The last prefix of each row that has one, from a table of the given lengths."""
    if (counts == counts[0]).all():
        return prefixes.narrow(0, len(prefixes) - len(counts), len(counts)) if counts[0] else prefixes
    held, table = table_rows(counts, int(counts.max()).bit_length())
    last = np.where(held, table, -1).max(axis=0)
    return prefixes.index_select(0, torch.from_numpy(last[last >= 0]).to(prefixes.device))


def _in_layout(outputs: Rows, plan: Plan, elements: Tensor) -> Tensor:
    """The answers in the shape of `elements`, zeros where there is padding."""
    if plan.valid is not None:
        padded = outputs.new_zeros(plan.num_elements, outputs.shape[-1])
        outputs = padded.index_copy(0, plan.valid, outputs)
    return outputs.view(elements.shape)
