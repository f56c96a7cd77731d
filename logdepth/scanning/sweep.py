"""Execute a plan on tensors: the up-sweep builds the blocks, and the down-sweep folds them into prefixes."""

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from logdepth.scanning.merge import Operator, OperatorPair, operator_pair
from logdepth.scanning.plan import Plan, RowsToTake
from logdepth.shapes import Blocks, Rows


class SelfSweepingOperator(ABC):
    """An operator that may run a whole plan itself, for example by kernels, instead of merging pairs of rows."""

    @abstractmethod
    def sweep_with(self, down: Operator, elements: Rows) -> "SweepFunction | None":
        """Return a function that does what `sweep` does with this operator for the up-sweep and `down` for the other.

        None if the plain `sweep` is to run for elements like these.
        """


def sweeps_itself(operator: Operator | OperatorPair, elements: Rows) -> bool:
    """Whether the operator runs a scan of such elements itself."""
    up, down = operator_pair(operator)
    return isinstance(up, SelfSweepingOperator) and up.sweep_with(down, elements) is not None


class SweepFunction(Protocol):
    """Does what `sweep` does; with `checkpoint`, in as little memory as possible."""

    def __call__(
        self, plan: Plan, elements: Rows, blocks: Blocks, prefixes: Blocks, edges: Blocks, *, checkpoint: bool
    ) -> "Swept": ...


class Swept(NamedTuple):
    """The results of the sweeps: the planned outputs, and the new state's blocks and prefixes in parts."""

    outputs: Rows
    blocks: list[Blocks]
    prefixes: list[Blocks]


def sweep(operator: OperatorPair, plan: Plan, elements: Rows, blocks: Blocks, prefixes: Blocks, edges: Blocks) -> Swept:
    """Run `plan`.

    Args:
        operator: the operators of the up-sweep and the down-sweep.
        plan: the plan.
        elements: the matrix of all elements.
        blocks: blocks of the old state at the plan's levels.
        prefixes: prefixes of the old state at the plan's levels.
        edges: prefixes that end where the plan's subtrees begin, one for each document that has such a prefix.
    """
    up, down = operator
    nodes = up_sweep(up, plan, elements, blocks)
    before = elements.narrow(0, 0, 0)
    new_blocks: list[Blocks] = []
    new_prefixes: list[Blocks] = []
    for level in reversed(plan.levels[plan.lowest :]):
        fresh = nodes.pop()
        extended = take(level.extended, before, edges)
        folded = down(extended, take(level.extending, fresh)) if level.extended.count else extended
        ending = take_parts(level.ending, prefixes, fresh, folded)
        if ending:
            edges = join([edges, *ending] if level.keeps_edges else ending)
            new_prefixes += ending
            new_blocks += take_parts(level.blocks, blocks, fresh)
        before = take(level.before, prefixes, fresh, folded, extended, edges)
    return Swept(take(plan.outputs, before), new_blocks, new_prefixes)


def up_sweep(up: Operator, plan: Plan, elements: Rows, blocks: Blocks) -> list[Rows]:
    """Return the fresh nodes of each level of `plan`, lowest first. The other arguments are those of `sweep`."""
    fresh = take(plan.elements, elements)
    nodes = [fresh]
    for level in plan.levels[:-1]:
        fresh = up(take(level.up_left, blocks, fresh), take(level.up_right, fresh))
        nodes.append(fresh)
    return nodes


def new_blocks(plan: Plan, nodes: list[Rows], blocks: Blocks) -> list[Blocks]:
    """Return the new state's blocks in parts, highest level first. `nodes` are those of `up_sweep`."""
    levels = range(plan.lowest, len(plan.levels))
    return [part for level in reversed(levels) for part in take_parts(plan.levels[level].blocks, blocks, nodes[level])]


def take(rows: RowsToTake, *matrices: Tensor) -> Tensor:
    """Return the given rows of `matrices`. Consecutive rows are returned as a view."""
    if rows.whole is not None:
        return matrices[rows.whole]
    return join(take_parts(rows, *matrices)) if rows.count else matrices[0].narrow(0, 0, 0)


def take_parts(rows: RowsToTake, *matrices: Tensor) -> list[Tensor]:
    """Return the given rows of `matrices` as a list of parts, without the copy that joining them would need."""
    if rows.whole is not None:
        return [matrices[rows.whole]] if rows.count else []
    if rows.index is not None:
        return [join([matrices[matrix] for matrix in rows.indexed]).index_select(0, rows.index)]
    return [
        matrices[part.matrix].narrow(0, part.start, part.count)
        if part.index is None
        else matrices[part.matrix].index_select(0, part.index)
        for part in rows.parts
    ]


def join(parts: list[Tensor]) -> Tensor:
    """Concatenate parts. A single part is not copied."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)
