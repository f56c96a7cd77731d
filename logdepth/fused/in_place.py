"""A program in which each result takes its right operand's row, so that in the end the elements' rows are the answers.
For passes that keep nothing for a backward one.

The up-sweep needs a right operand once, and so does the down-sweep, whose right operands are the blocks that the
up-sweep has left; blocks of the new state are read between the two. So it is with every plan that we know of. But it is
looked at: where a row would no longer hold what is read, there is no such program.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from logdepth.fused.cell import Spacing
from logdepth.fused.program import Program, spacing_of
from logdepth.kernels import linear
from logdepth.scanning.plan import Plan
from logdepth.scanning.plan_cache import PLANS

MOST_LEFT_OUT = 1 / 32
"""Of the pairs that are multiplied so that a call's are evenly spaced: the first block of a row has no prefix to
extend, so that of 32 blocks one is left out."""


class PlacedCall(NamedTuple):
    """The merges of a call; also pairs between them whose results are left out, where that makes them evenly spaced."""

    left: Tensor
    right: Tensor
    to: Tensor
    """Rows of the results, int32; −1: left out."""
    spacing: Spacing | None


class InPlace(NamedTuple):
    up: tuple[PlacedCall, ...]
    down: tuple[PlacedCall, ...]
    outputs: Tensor | None
    """Rows of the answers; None: all rows, in their order."""
    blocks: Tensor
    """Rows of the blocks of the new state, between the sweeps."""
    prefixes: Tensor


def in_place_of(plan: Plan, program: Program) -> InPlace | None:
    """A plan's program in place, where there is one; looked for once, and kept with the plan.

    While a graph is captured nothing can be read back: then there is none that was not there before.
    """
    if "in place" not in plan.derived:
        if program.outputs.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        with torch.inference_mode(False):
            made = _in_place(program)
        PLANS.keep_with(plan, "in place", made, nbytes=0 if made is None else _nbytes(made))
    found: InPlace | None = plan.derived["in place"]
    return found


def _nbytes(placed: InPlace) -> int:
    tensors = [placed.blocks, placed.prefixes, *(() if placed.outputs is None else (placed.outputs,))]
    tensors += [one for call in (*placed.up, *placed.down) for one in {call.left, call.right, call.to}]
    return sum(one.nbytes for one in tensors)


def _in_place(program: Program) -> InPlace | None:
    device = program.outputs.device
    row = torch.arange(program.num_states)  # of each state
    held = torch.arange(program.num_inputs)  # which state each row holds

    def holds(*states: Tensor) -> bool:
        return all(torch.equal(held[row[one]], one) for one in states)

    def placed(up: bool) -> tuple[PlacedCall, ...] | None:
        calls: list[PlacedCall] = []
        for call in program.calls:
            if call.up == up:
                left, right = call.left.cpu().long(), call.right.cpu().long()
                if not holds(right):
                    return None
                results = torch.arange(call.result, call.result + call.num_merges)
                row[results] = row[right]
                held[row[right]] = results
                if not holds(left, results):  # asked now: merges of a call come in no order
                    return None
                calls.append(_evenly_spaced(row[left], row[right], device))
        return tuple(calls)

    outputs, blocks, prefixes = (one.cpu() for one in (program.outputs, program.blocks, program.prefixes))
    up = placed(True)
    block_rows = row[blocks]
    if up is None or not holds(blocks):
        return None
    down = placed(False)
    if down is None or not holds(outputs, prefixes):
        return None
    all_in_order = torch.equal(row[outputs], torch.arange(program.num_inputs))
    return InPlace(
        up, down, None if all_in_order else row[outputs].to(device), block_rows.to(device), row[prefixes].to(device)
    )


def _evenly_spaced(left: Tensor, right: Tensor, device: torch.device) -> PlacedCall:
    """With pairs that are left out, where these are few and there are enough merges for it to matter."""
    to, apart = None, right - left
    steps, as_far_apart = left.diff(), bool((apart == apart[0]).all() and apart[0] > 0)
    if len(left) >= max(2, linear.FEWEST_ROWS) and as_far_apart and int(steps.min()) > 0:
        step = int(steps.min())
        number = (left - left[0]).div(step, rounding_mode="floor")
        every = left[0] + step * torch.arange(int(number[-1]) + 1)
        left_out = len(every) - len(left)
        if 0 < left_out <= MOST_LEFT_OUT * len(every) and torch.equal(every[number], left):
            to = torch.full_like(every, -1).index_copy(0, number, right)
            left, right = every, every + apart[0]
    spacing = spacing_of(left, right)
    left, right = left.int().to(device), right.int().to(device)
    return PlacedCall(left, right, right if to is None else to.int().to(device), spacing)
