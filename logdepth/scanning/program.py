"""A plan as a program over one matrix of states: which rows each merge reads, and where its result goes.

It is the sweep itself, run on row numbers instead of states. Whatever a plan says about joining, cutting and ordering
rows is then a matter of indices: no state is ever copied to stand beside another.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from logdepth.scanning.plan import Plan
from logdepth.scanning.plan_cache import PLANS
from logdepth.scanning.sweep import sweep


class Call(NamedTuple):
    """The merges of one level of one sweep."""

    left: Tensor
    """Rows of the left operands, int32, on the device."""
    right: Tensor
    first: int
    """How many merges come before these in the program."""
    num_merges: int
    result: int
    """The row of the first result; the others follow."""
    up: bool
    """Of the up-sweep."""
    adjacent_from: int | None
    """The row of the first left operand, where each pair follows the one before without a gap."""


class Program(NamedTuple):
    """All merges of a scan. Rows of states: elements, stored blocks, stored prefixes, edges, then results by call."""

    calls: tuple[Call, ...]
    num_inputs: int
    num_states: int
    num_merges: int
    num_up_merges: int
    """They come first."""
    left: Tensor
    """Of all calls, end to end."""
    right: Tensor
    outputs: Tensor
    """Rows of the answers, in their order; int64, each at most once."""
    blocks: Tensor
    """Rows of the blocks of the new state."""
    prefixes: Tensor
    groups: tuple[tuple[Call, ...], ...]
    """The calls, last first, in runs of about as many merges as the largest call has."""


def program_of(plan: Plan, num_edges: int, device: torch.device) -> Program:
    """The program of a plan, made once and kept with it."""
    program: Program | None = plan.derived.get("program")
    if program is None:
        with torch.inference_mode(False):  # a later pass may have a backward one, which keeps some of its tensors
            program = _program(plan, num_edges, device)
        tensors = (program.left, program.right, program.outputs, program.blocks, program.prefixes)
        PLANS.keep_with(plan, "program", program, nbytes=sum(one.nbytes for one in tensors))
    return program


def _program(plan: Plan, num_edges: int, device: torch.device) -> Program:
    sizes = (plan.num_elements, plan.num_stored, plan.num_stored, num_edges)
    num_inputs = sum(sizes)
    elements, blocks, prefixes, edges = torch.split(torch.arange(num_inputs, device=device)[:, None], list(sizes))
    calls: list[Call] = []

    def recording(up: bool) -> Callable[[Tensor, Tensor], Tensor]:
        def merge(left: Tensor, right: Tensor) -> Tensor:
            # In the order of time, so that operands of the next level lie side by side.
            order = right[:, 0].argsort()
            first = calls[-1].first + calls[-1].num_merges if calls else 0
            ordered_left, ordered_right = left[order, 0], right[order, 0]
            calls.append(
                Call(
                    ordered_left.int(),
                    ordered_right.int(),
                    first,
                    len(left),
                    num_inputs + first,
                    up,
                    _adjacent_from(ordered_left, ordered_right),
                )
            )
            results = torch.empty_like(left)
            results[order, 0] = num_inputs + first + torch.arange(len(left), device=device)
            return results

        return merge

    swept = sweep((recording(True), recording(False)), plan, elements, blocks, prefixes, edges)
    num_merges = sum(call.num_merges for call in calls)
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    left = torch.cat([nothing, *(call.left for call in calls)])
    right = torch.cat([nothing, *(call.right for call in calls)])
    parts = [slice(call.first, call.first + call.num_merges) for call in calls]
    calls = [call._replace(left=left[part], right=right[part]) for call, part in zip(calls, parts, strict=True)]
    return Program(
        calls=tuple(calls),
        num_inputs=num_inputs,
        num_states=num_inputs + num_merges,
        num_merges=num_merges,
        num_up_merges=sum(call.num_merges for call in calls if call.up),
        left=left,
        right=right,
        outputs=swept.outputs[:, 0].contiguous(),
        blocks=torch.cat([elements[:0], *swept.blocks])[:, 0].contiguous(),
        prefixes=torch.cat([elements[:0], *swept.prefixes])[:, 0].contiguous(),
        groups=_groups(calls),
    )


def _adjacent_from(left: Tensor, right: Tensor) -> int | None:
    first = int(left[0])
    every = first + torch.arange(2 * len(left), device=left.device).view(-1, 2)
    return first if torch.equal(torch.stack([left, right], dim=1).long(), every) else None


def _groups(calls: list[Call]) -> tuple[tuple[Call, ...], ...]:
    enough = max((call.num_merges for call in calls), default=0)
    groups: list[list[Call]] = []
    rows = enough
    for call in reversed(calls):
        if rows + call.num_merges > enough:
            groups.append([])
            rows = 0
        groups[-1].append(call)
        rows += call.num_merges
    return tuple(tuple(group) for group in groups)
