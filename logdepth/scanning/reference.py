"""The definition of the scan, in slow and simple code against which all fast code is tested.

It processes one sequence at a time and merges one pair of rows per operator call, without batching and without a state.
It restates the up-sweep and down-sweep of "Log-Depth Recurrent Language Modeling" without sweeps:

    block(l, j)  = e_j                                        if l = 0
                   block(l-1, 2j) ⊙up block(l-1, 2j+1)        otherwise; it covers elements j·2^l … (j+1)·2^l - 1
    prefix(n)    = the left fold, with ⊙down, of the blocks in n's binary decomposition, largest first

For example, prefix(13) = (block(3, 0) ⊙ block(2, 2)) ⊙ block(0, 12). prefix(n) depends only on the first n elements.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from logdepth.scanning.merge import Operator, OperatorPair, operator_pair
from logdepth.shapes import Batch, Rows


def scan(operator: Operator | OperatorPair, elements: Batch) -> Batch:
    """Return all prefixes of all sequences of a batch: `out[b, i]` is the state of elements 0 … i of sequence b."""
    rows = [torch.stack(sequence_prefixes(operator, row)) if len(row) else row for row in elements]
    return torch.stack(rows) if rows else elements


def sequence_prefixes(operator: Operator | OperatorPair, elements: Rows) -> list[Tensor]:
    """Return the prefixes of lengths 1 … n of one sequence `[n, width]`, each of shape `[width]`."""
    up, down = operator_pair(operator)

    def prefix(blocks: dict[int, Tensor]) -> Tensor:
        state = None
        for level in sorted(blocks, reverse=True):
            state = blocks[level] if state is None else down(state[None], blocks[level][None])[0]
        assert state is not None
        return state

    return [prefix(blocks) for blocks in sequence_blocks(up, elements)]


def sequence_blocks(operator: Operator, elements: Rows) -> list[dict[int, Tensor]]:
    """Return the blocks of the prefixes of lengths 1 … n of one sequence `[n, width]`.

    Those of a prefix are in a dictionary by level, from the latest (smallest) to the earliest (largest).
    """
    block = _blocks(operator, elements)
    lengths = range(1, len(elements) + 1)
    return [
        {level: block(level, (length >> level) - 1) for level in range(length.bit_length()) if length >> level & 1}
        for length in lengths
    ]


def _blocks(up: Operator, elements: Rows) -> Callable[[int, int], Tensor]:
    built: dict[tuple[int, int], Tensor] = {}

    def block(level: int, index: int) -> Tensor:
        if level == 0:
            return elements[index]
        if (level, index) not in built:
            left, right = block(level - 1, 2 * index), block(level - 1, 2 * index + 1)
            built[level, index] = up(left[None], right[None])[0]
        return built[level, index]

    return block
