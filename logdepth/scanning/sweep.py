"""The two sweeps over tensors, as a plan says: up to build the blocks, down to fold them into prefixes.

It knows rows and matrices; which document a row belongs to, and why it is read, is the plan's business.
"""

from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from logdepth.scanning.merge import Operator, OperatorPair
from logdepth.scanning.plan import Plan, RowsToTake
from logdepth.shapes import Blocks, Rows


class SelfSweepingOperator(ABC):
    """An operator that may sweep a whole plan by itself, for example by kernels."""

    @abstractmethod
    def sweep_with(self, down: Operator, elements: Rows) -> "SweepFunction | None":
        """A function that computes what `sweep` does, with this operator in the up-sweep and `down` in the down-sweep.

        None where elements like these are to be swept by the plain `sweep`.
        """


class SweepFunction(Protocol):
    """Computes what `sweep` does; with `checkpoint`, in as little memory as possible."""

    def __call__(
        self, plan: Plan, elements: Rows, blocks: Blocks, prefixes: Blocks, edges: Blocks, *, checkpoint: bool
    ) -> "Swept": ...


class Swept(NamedTuple):
    """What the sweeps bring back: the planned outputs, and the new state's blocks and prefixes in parts."""

    outputs: Rows
    blocks: list[Blocks]
    prefixes: list[Blocks]


def sweep(operator: OperatorPair, plan: Plan, elements: Rows, blocks: Blocks, prefixes: Blocks, edges: Blocks) -> Swept:
    """Run `plan`.

    `blocks` and `prefixes` are what the old state stores for the plan's levels, `edges` the prefixes above them.
    """
    up, down = operator
    fresh = take(plan.elements, elements)
    nodes = [fresh]
    for level in plan.levels[:-1]:
        fresh = up(take(level.up_left, blocks, fresh), take(level.up_right, fresh))
        nodes.append(fresh)

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


def take(rows: RowsToTake, *matrices: Tensor) -> Tensor:
    """The rows that `rows` names in `matrices`; consecutive ones come back as a view."""
    if rows.whole is not None:
        return matrices[rows.whole]
    return join(take_parts(rows, *matrices)) if rows.count else matrices[0].narrow(0, 0, 0)


def take_parts(rows: RowsToTake, *matrices: Tensor) -> list[Tensor]:
    """The same, in parts that would have to be copied to be joined."""
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
    return parts[0] if len(parts) == 1 else torch.cat(parts)
