"""The public functions `scan` and `reduce`. They check arguments, look up the plan and run the sweeps."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from logdepth.ops.dispatch import outside_compiled_graphs
from logdepth.scanning.arguments import check_state, layout_of
from logdepth.scanning.integers import LengthsLike
from logdepth.scanning.lengths import Lengths
from logdepth.scanning.merge import Operator, OperatorPair, check_width, checked_pair, operator_pair
from logdepth.scanning.plan import Plan
from logdepth.scanning.plan_cache import PLANS
from logdepth.scanning.state import ScanState, joined_table, last_prefixes, split_table
from logdepth.scanning.sweep import SelfSweepingOperator, Swept, sweep
from logdepth.shapes import Batch, Blocks, Packed, Roots, Rows


class ScanResult(NamedTuple):
    """All prefixes, in the layout of the elements, and the state from which a later scan can continue."""

    prefixes: Tensor
    state: ScanState


@outside_compiled_graphs
def scan(
    operator: Operator | OperatorPair,
    elements: Batch | Packed,
    state: ScanState | None = None,
    *,
    lengths: LengthsLike | None = None,
    cu_seqlens: LengthsLike | None = None,
    checkpoint: bool = False,
) -> ScanResult:
    """Compute all prefixes of all sequences.

    A scan needs O(log length) operator calls and about 2 · length merges per sequence.

    Args:
        operator: a callable or module (left, right) -> merged on `[rows, width]`, with left earlier in time. It need
            not be associative. A pair (up, down) is also accepted: `up` merges blocks, and `down` folds a block onto a
            prefix.
        elements: a batch `[batch, length, width]`, or packed documents `[total, width]` with `cu_seqlens`.
        state: the state that an earlier scan of the same sequences returned; by default, sequences start empty.
        lengths: number of valid new elements per row, for a batch that is padded on the right. The operator never
            receives padding, and its prefixes are zeros.
        cu_seqlens: cumulative lengths of packed documents, `[0, n_0, n_0 + n_1, …, total]`. A `state` has one row per
            document.
        checkpoint: recompute merges in the backward pass instead of storing their intermediate results, which saves
            memory and takes more time.

    Returns:
        `prefixes`, in the shape of `elements`: position i contains the state of elements 0 … i, from which to predict
        element i + 1. And `state`, the state at the end of each sequence.

    The computation depends on the lengths, so they must be known on the host. `lengths` or `cu_seqlens` on a GPU are
    copied to the host first. Without them, and if all rows of `state` have the same length, `scan` does not synchronise
    with the GPU.
    """
    layout = layout_of(elements, lengths, cu_seqlens)
    if state is not None:
        check_state(state, elements, layout)
    run_sweeps = _bound_sweep(operator, elements, checkpoint)
    old = state.row_lengths if state is not None else Lengths(layout.new.num_rows, 0, None)
    flat = elements.reshape(layout.num_elements, elements.shape[-1])
    nothing = flat.narrow(0, 0, 0)
    if not layout.new.total:
        zeros = torch.cat([nothing, flat.new_zeros(flat.shape)])  # part of the autograd graph, like other prefixes
        return ScanResult(zeros.view(elements.shape), _empty_state(old, elements) if state is None else state)

    total = old.plus(layout.new)
    above, below = old.split(old.levels_touched(total))
    plan = PLANS.plan(below, above, layout, elements.device)
    if state is None:
        kept = kept_prefixes = nothing
        swept = run_sweeps(plan, flat, nothing, nothing, nothing)
    else:
        # Levels that the new elements do not change come first in the tables and are kept.
        kept, stored = split_table(state.blocks, plan.num_stored, nothing)
        kept_prefixes, stored_prefixes = split_table(state.prefixes, plan.num_stored, nothing)
        edges = last_prefixes(kept_prefixes, above)
        swept = run_sweeps(plan, flat, stored, stored_prefixes, edges)
    blocks = joined_table(kept, swept.blocks, plan.by_document)
    prefixes = joined_table(kept_prefixes, swept.prefixes, plan.by_document)
    return ScanResult(_with_padding(swept.outputs, plan).view(elements.shape), ScanState(total, blocks, prefixes))


@outside_compiled_graphs
def reduce(
    operator: Operator | OperatorPair,
    elements: Batch | Packed,
    *,
    lengths: LengthsLike | None = None,
    cu_seqlens: LengthsLike | None = None,
) -> Roots:
    """Compute the last prefix of each sequence, `[batch, width]`.

    The result equals `scan(...).prefixes` at the last valid position of each sequence. It needs fewer than `length`
    merges per sequence, about half of a scan's. The arguments are those of `scan`; every sequence must have at least
    one element.
    """
    layout = layout_of(elements, lengths, cu_seqlens)
    empty = np.flatnonzero(layout.new.array() == 0)
    if empty.size:
        what = "document" if layout.row_stride is None else "row"
        raise ValueError(f"cannot reduce {what} {empty[0]}: it has no elements, and there is no identity to return")
    run_sweeps = _bound_sweep(operator, elements, checkpoint=False)
    flat = elements.reshape(layout.num_elements, elements.shape[-1])
    nothing = flat.narrow(0, 0, 0)
    if not layout.new.num_rows:
        return nothing
    none = Lengths(layout.new.num_rows, 0, None)
    plan = PLANS.plan(none, none, layout, elements.device, every_prefix=False)
    return _with_padding(run_sweeps(plan, flat, nothing, nothing, nothing).outputs, plan)


def _bound_sweep(
    operator: Operator | OperatorPair, elements: Tensor, checkpoint: bool
) -> Callable[[Plan, Rows, Blocks, Blocks, Blocks], Swept]:
    """Return the function that runs a plan with this operator on elements, stored blocks, stored prefixes and edges."""
    up, down = operator_pair(operator)
    own = up.sweep_with(down, elements) if isinstance(up, SelfSweepingOperator) else None
    if own is None:
        return partial(sweep, checked_pair(operator, elements, checkpoint))
    check_width(up, elements)
    return partial(own, checkpoint=checkpoint and torch.is_grad_enabled())


def _empty_state(lengths: Lengths, elements: Tensor) -> ScanState:
    return ScanState.empty(lengths.num_rows, elements.shape[-1], dtype=elements.dtype, device=elements.device)


def _with_padding(outputs: Rows, plan: Plan) -> Rows:
    """Return the prefixes at the positions of their elements, with zeros as padding.

    They share no memory with the elements, except if the operator wrote the elements into its own workspace.
    """
    if plan.valid is not None:
        padded = outputs.new_zeros(plan.num_elements, outputs.shape[-1])
        return padded.index_copy(0, plan.valid, outputs)
    nothing_was_merged = len(plan.levels) == 1 and not plan.levels[0].extended.count
    return outputs.clone() if nothing_was_merged else outputs
