"""`scan` and `reduce`: the public functions. They check arguments, find the plan, and run the sweeps."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from logdepth.ops.uncompiled import outside_compiled_graphs
from logdepth.scanning.arguments import check_state, layout_of
from logdepth.scanning.integers import LengthsLike
from logdepth.scanning.lengths import Lengths
from logdepth.scanning.merge import Operator, OperatorPair, check_width, checked_pair, operator_pair
from logdepth.scanning.plan import Plan
from logdepth.scanning.plan_cache import PLANS
from logdepth.scanning.state import ScanState, last_prefixes
from logdepth.scanning.sweep import SelfSweepingOperator, Swept, sweep
from logdepth.shapes import Batch, Blocks, Packed, Roots, Rows


class ScanResult(NamedTuple):
    """Every prefix, in the layout of the elements, and the state from which a later scan continues."""

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
    """The state of every prefix of every sequence, in O(log length) operator calls and about 2 · length merges a row.

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
    swept_by = _sweep_of(operator, elements, checkpoint)
    old = state.row_lengths if state is not None else Lengths(layout.new.num_rows, 0, None)
    flat = elements.reshape(layout.num_elements, elements.shape[-1])
    nothing = flat.narrow(0, 0, 0)
    if not layout.new.total:
        zeros = torch.cat([nothing, flat.new_zeros(flat.shape)])  # in the graph, as other prefixes are
        return ScanResult(zeros.view(elements.shape), _empty_state(old, elements) if state is None else state)

    total = old.plus(layout.new)
    above, below = old.split(old.levels_touched(total))
    plan = PLANS.plan(below, above, layout, elements.device)
    if state is None:
        kept = kept_prefixes = nothing
        swept = swept_by(plan, flat, nothing, nothing, nothing)
    else:
        # Levels that the new elements do not touch come first in the tables, and stay as they are.
        kept, stored = _cut(state.blocks, plan.num_stored, nothing)
        kept_prefixes, stored_prefixes = _cut(state.prefixes, plan.num_stored, nothing)
        edges = last_prefixes(kept_prefixes, above)
        swept = swept_by(plan, flat, stored, stored_prefixes, edges)
    blocks = _table(kept, swept.blocks, plan.by_document)
    prefixes = _table(kept_prefixes, swept.prefixes, plan.by_document)
    return ScanResult(_answers(swept.outputs, plan).view(elements.shape), ScanState(total, blocks, prefixes))


@outside_compiled_graphs
def reduce(
    operator: Operator | OperatorPair,
    elements: Batch | Packed,
    *,
    lengths: LengthsLike | None = None,
    cu_seqlens: LengthsLike | None = None,
) -> Roots:
    """The last prefix of every sequence, `[batch, width]`: the up-sweep and one fold, fewer than `length` merges a row.

    It equals `scan(...).prefixes` at each row's last valid position, at about half the cost.
    """
    layout = layout_of(elements, lengths, cu_seqlens)
    empty = np.flatnonzero(layout.new.array() == 0)
    if empty.size:
        what = "document" if layout.row_stride is None else "row"
        raise ValueError(f"cannot reduce {what} {empty[0]}: it has no elements, and there is no identity to return")
    swept_by = _sweep_of(operator, elements, checkpoint=False)
    flat = elements.reshape(layout.num_elements, elements.shape[-1])
    nothing = flat.narrow(0, 0, 0)
    if not layout.new.num_rows:
        return nothing
    none = Lengths(layout.new.num_rows, 0, None)
    plan = PLANS.plan(none, none, layout, elements.device, every_prefix=False)
    return _answers(swept_by(plan, flat, nothing, nothing, nothing).outputs, plan)


def _sweep_of(
    operator: Operator | OperatorPair, elements: Tensor, checkpoint: bool
) -> Callable[[Plan, Rows, Blocks, Blocks, Blocks], Swept]:
    """How this operator sweeps a plan over elements, stored blocks, stored prefixes and edges."""
    up, down = operator_pair(operator)
    own = up.sweep_with(down, elements) if isinstance(up, SelfSweepingOperator) else None
    if own is None:
        return partial(sweep, checked_pair(operator, elements, checkpoint))
    check_width(up, elements)
    return partial(own, checkpoint=checkpoint and torch.is_grad_enabled())


def _empty_state(lengths: Lengths, elements: Tensor) -> ScanState:
    return ScanState.empty(lengths.num_rows, elements.shape[-1], dtype=elements.dtype, device=elements.device)


def _cut(table: Blocks, num_last: int, nothing: Blocks) -> tuple[Blocks, Blocks]:
    """The table's first rows, and its last `num_last`."""
    if not num_last:
        return table, nothing
    num_first = table.shape[0] - num_last
    return table.narrow(0, 0, num_first), table.narrow(0, num_first, num_last)


def _table(kept: Blocks, parts: list[Blocks], order: Tensor | None) -> Blocks:
    """The new state's table. Concatenation copies, also where there is one part: the state owns its storage."""
    if order is not None:
        parts = [torch.cat(parts).index_select(0, order)]
    return torch.cat([kept, *parts])


def _answers(outputs: Rows, plan: Plan) -> Rows:
    """The answers where the elements were, with zeros where there is padding. They share no memory with elements,
    but for those that were written where their operator has room for it."""
    if plan.valid is not None:
        padded = outputs.new_zeros(plan.num_elements, outputs.shape[-1])
        return padded.index_copy(0, plan.valid, outputs)
    nothing_was_merged = len(plan.levels) == 1 and not plan.levels[0].extended.count
    return outputs.clone() if nothing_was_merged else outputs
