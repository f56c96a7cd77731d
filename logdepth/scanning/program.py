"""A plan as a program over one matrix of states: which rows each merge reads, and where its result goes.

It is the sweep itself, run on row numbers instead of states. Whatever a plan says about joining, cutting and ordering
rows is then a matter of indices: no state is ever copied to stand beside another.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from logdepth.scanning.plan import Plan
from logdepth.scanning.plan_cache import PLANS
from logdepth.scanning.state import joined_table, split_table
from logdepth.scanning.sweep import new_blocks, sweep, up_sweep
from logdepth.shapes import Rows


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


class UpProgram(NamedTuple):
    """All merges of an up-sweep. Rows of states: elements, all stored blocks, then results by call."""

    calls: tuple[Call, ...]
    num_inputs: int
    num_merges: int
    nodes: tuple[Tensor, ...]
    """Rows of the fresh nodes of each level, in the order of the plan; int64, as all of the following but the last."""
    block_inputs: Tensor
    """The blocks of the new state that are inputs."""
    block_results: Tensor
    """Those that are results, by their numbers among the results."""
    block_order: Tensor
    """The order of the former and then the latter in the state."""
    lone_inputs: Tensor
    """Rows of inputs that no merge reads."""
    is_read: Tensor
    """Whether a later merge reads the result of each merge, int8."""


class MergesFunction(Protocol):
    """Runs the merges of an up-sweep on its inputs; returns the inputs and, in the order of the program, the results.

    The inputs are returned so that gradients of both meet in the backward pass.
    """

    def __call__(self, program: UpProgram, inputs: Rows) -> tuple[Rows, Rows]: ...


class SelfMergingOperator(ABC):
    """An operator that may run the merges of a whole up-sweep itself, for example by kernels."""

    @abstractmethod
    def merges_with(self, elements: Rows) -> MergesFunction | None:
        """Return the function that runs them; None if the plain up-sweep is to run for elements like these."""


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
    pair = _recording(calls, num_inputs, up=True), _recording(calls, num_inputs, up=False)
    swept = sweep(pair, plan, elements, blocks, prefixes, edges)
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


def up_program_of(plan: Plan, num_blocks: int, device: torch.device) -> UpProgram:
    """The program of a plan's up-sweep, for a state of so many blocks; made once and kept with the plan."""
    name = f"up-sweep after {num_blocks} blocks"
    program: UpProgram | None = plan.derived.get(name)
    if program is None:
        with torch.inference_mode(False):
            program = _up_program(plan, num_blocks, device)
        tensors = [one for one in program if isinstance(one, Tensor)] + list(program.nodes)
        tensors += [one for call in program.calls for one in (call.left, call.right)]
        PLANS.keep_with(plan, name, program, nbytes=sum(one.nbytes for one in tensors))
    return program


def _up_program(plan: Plan, num_blocks: int, device: torch.device) -> UpProgram:
    num_inputs = plan.num_elements + num_blocks
    numbers = torch.arange(num_inputs, device=device)[:, None]
    elements, table = numbers[: plan.num_elements], numbers[plan.num_elements :]
    kept, stored = split_table(table, plan.num_stored, elements[:0])
    calls: list[Call] = []
    nodes = up_sweep(_recording(calls, num_inputs, up=True), plan, elements, stored)
    blocks = joined_table(kept, new_blocks(plan, nodes, stored), plan.by_document)[:, 0]
    num_merges = sum(call.num_merges for call in calls)
    is_read = torch.zeros(num_inputs + num_merges, dtype=torch.int8, device=device)
    for call in calls:
        is_read[call.left.long()] = is_read[call.right.long()] = 1
    return UpProgram(
        calls=tuple(calls),
        num_inputs=num_inputs,
        num_merges=num_merges,
        nodes=tuple(level[:, 0].contiguous() for level in nodes),
        block_inputs=blocks[blocks < num_inputs],
        block_results=blocks[blocks >= num_inputs] - num_inputs,
        block_order=(blocks >= num_inputs).byte().argsort(stable=True).argsort(),
        lone_inputs=(is_read[:num_inputs] == 0).nonzero()[:, 0],
        is_read=is_read[num_inputs:].contiguous(),
    )


def _recording(calls: list[Call], num_inputs: int, *, up: bool) -> Callable[[Tensor, Tensor], Tensor]:
    """Return an operator on numbers of rows that appends its merges to `calls`."""

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
        results[order, 0] = num_inputs + first + torch.arange(len(left), device=left.device)
        return results

    return merge


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
