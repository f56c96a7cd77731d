"""The two sweeps over tensors, as a plan says: up to build the blocks, down to fold them into prefixes.

It knows rows and matrices; which document a row belongs to, and why it is read, is the plan's business.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from logdepth.scanning.merge import OperatorPair
from logdepth.scanning.plan import Plan
from logdepth.scanning.plan import Rows as RowsToTake
from logdepth.shapes import Blocks, Rows


class Swept(NamedTuple):
    """What the sweeps bring back: the planned outputs, and the new state's blocks and prefixes level by level."""

    outputs: Rows
    blocks: list[Blocks]
    prefixes: list[Blocks]


def sweep(plan: Plan, operator: OperatorPair, elements: Rows, blocks: Blocks, prefixes: Blocks, edges: Blocks) -> Swept:
    """Run `plan`. `blocks` and `prefixes` are what the old state stores for its levels, `edges` the prefixes above."""
    up, down = operator
    fresh = take(plan.elements, elements)
    nodes = [fresh]
    for level in plan.levels[:-1]:
        fresh = up(take(level.up_left, blocks, fresh), take(level.up_right, fresh))
        nodes.append(fresh)

    before = elements.narrow(0, 0, 0)
    new_blocks, new_prefixes = [], []
    for level in reversed(plan.levels[plan.lowest :]):
        fresh = nodes.pop()
        extended = take(level.extended, before, edges)
        folded = down(extended, take(level.extending, fresh)) if level.extended.count else extended
        ending = take(level.prefixes, prefixes, fresh, folded)
        edges = take(level.edges, edges, ending)
        before = take(level.before, prefixes, fresh, folded, extended, edges)
        if level.blocks.count:
            new_blocks.append(take(level.blocks, blocks, fresh))
            new_prefixes.append(ending)
    return Swept(take(plan.outputs, before), new_blocks, new_prefixes)


def take(rows: RowsToTake, *sources: Tensor) -> Tensor:
    """The rows that `rows` names in `sources` laid end to end; a single run comes back as a view."""
    if rows.whole is not None:
        return sources[rows.whole]
    if rows.index is not None:
        read = [sources[source] for source in rows.indexed]
        return (read[0] if len(read) == 1 else torch.cat(read)).index_select(0, rows.index)
    runs = [sources[source].narrow(0, start, count) for source, start, count in rows.runs]
    return runs[0] if len(runs) == 1 else torch.cat(runs) if runs else sources[0].narrow(0, 0, 0)
