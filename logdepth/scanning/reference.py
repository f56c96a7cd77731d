"""The definition of the scan, in slow and simple code against which all fast code is tested.

It processes one sequence at a time and merges one pair of rows per operator call, without batching and without a state.
It restates the up-sweep and down-sweep of "Log-Depth Recurrent Language Modeling" without sweeps:

    block(l, j)  = e_j                                        if l = 0
                   block(l-1, 2j) ⊙up block(l-1, 2j+1)        otherwise; it covers elements j·2^l … (j+1)·2^l - 1
    prefix(n)    = the left fold, with ⊙down, of the blocks in n's binary decomposition, largest first

For example, prefix(13) = (block(3, 0) ⊙ block(2, 2)) ⊙ block(0, 12). prefix(n) depends only on the first n elements.
"""

import torch

from logdepth.scanning.merge import Operator, OperatorPair, operator_pair
from logdepth.shapes import Batch, Rows


def scan(operator: Operator | OperatorPair, elements: Batch) -> Batch:
    """Return all prefixes of all sequences of a batch: `out[b, i]` is the state of elements 0 … i of sequence b."""
    rows = [torch.stack(sequence_prefixes(operator, row)) if len(row) else row for row in elements]
    return torch.stack(rows) if rows else elements


def sequence_prefixes(operator: Operator | OperatorPair, elements: Rows) -> list[torch.Tensor]:
    """Return the prefixes of lengths 1 … n of one sequence `[n, width]`, each of shape `[width]`."""
    up, down = operator_pair(operator)
    built: dict[tuple[int, int], torch.Tensor] = {}

    def block(level: int, index: int) -> torch.Tensor:
        if level == 0:
            return elements[index]
        if (level, index) not in built:
            left, right = block(level - 1, 2 * index), block(level - 1, 2 * index + 1)
            built[level, index] = up(left[None], right[None])[0]
        return built[level, index]

    def prefix(length: int) -> torch.Tensor:
        state, done = None, 0
        for level in reversed(range(length.bit_length())):
            if length >> level & 1:
                following = block(level, done >> level)
                state = following if state is None else down(state[None], following[None])[0]
                done += 1 << level
        assert state is not None
        return state

    return [prefix(length) for length in range(1, len(elements) + 1)]
