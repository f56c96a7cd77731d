"""A scan of one sequence whose consecutive pieces are on different processes (ranks).

A rank reduces its piece to the blocks of the whole sequence's tree that lie in it, of which there are at most
2 ⌈log2(length of the piece)⌉. One message gives all ranks all blocks. From those before its piece, a rank makes the
state that a scan of everything before would have left, and continues from it. The tree is that of the definition, so
the result is that of a scan by one process, to rounding.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from logdepth.ops.dropout import drops
from logdepth.scanning.lengths import Lengths
from logdepth.scanning.merge import Operator, OperatorPair, operator_pair
from logdepth.scanning.prefix_scan import reduce, scan
from logdepth.scanning.state import ScanState
from logdepth.shapes import Packed, Rows


class _Block(NamedTuple):
    """A node of a document's tree: the elements start … start + 2^level - 1, counted in the document."""

    start: int
    level: int


def scan_across_ranks(
    operator: Operator | OperatorPair,
    elements: Packed,
    cuts: Sequence[int],
    *,
    cu_seqlens: Sequence[int] | None = None,
    group: Any = None,
) -> Rows:
    """Compute the prefixes of this rank's piece of a sequence, `[length of the piece, width]`.

    Every rank of the group must call it, and if one differentiates the result, all must. Gradients of elements arrive
    at the rank that has them. Gradients of the operator's weights are this rank's share: their sum over all ranks is
    that of one process.

    Args:
        operator: as for `scan`. It must not drop anything, because ranks repeat some merges.
        elements: the piece `[length, width]`; pieces follow each other in the order of the ranks.
        cuts: where the pieces start in the whole sequence, and last its length; the same on all ranks. Pieces may have
            any lengths, also 0.
        cu_seqlens: where packed documents start in the whole sequence, and last its length. By default, the sequence is
            one document.
        group: the process group; by default all processes.
    """
    rank, pieces = dist.get_rank(group), list(pairwise(cuts))
    documents = list(pairwise([cuts[0], cuts[-1]] if cu_seqlens is None else cu_seqlens))
    _check(operator, elements, pieces, documents, rank, dist.get_world_size(group))
    sent = [_blocks_sent(piece, documents) for piece in pieces]
    start, stop = pieces[rank]
    gathered = None
    if (most := max(len(blocks) for blocks in sent)) and any(_continues(piece, documents) for piece in pieces):
        sizes = [1 << block.level for block in sent[rank]]
        roots = elements.new_zeros(0, elements.shape[-1])
        if sizes:
            last = elements[stop - start - sum(sizes) :]
            roots = reduce(operator, last, cu_seqlens=[0, *np.cumsum(sizes).tolist()])
        padding = elements.new_zeros(most - len(roots), elements.shape[-1])
        # The narrow of no elements ties the message to the graph where a rank sends nothing.
        gathered = _Gathered.apply(torch.cat([roots, padding, elements[:0]]), group)  # type: ignore[no-untyped-call]
    bounds = [start, *(first for first, _ in documents if start < first < stop), stop]
    state = None
    if gathered is not None and stop > start and (old := start - _document_at(start, documents)[0]):
        chain = [
            (block, gathered[other, number : number + 1])
            for other in range(rank)
            if pieces[other][1] > start - old
            for number, block in enumerate(sent[other])
        ]
        blocks, prefixes = _state_tables(operator, chain)
        lengths = np.array([old, *[0] * (len(bounds) - 2)])
        state = ScanState(Lengths.of(lengths), blocks, prefixes)
    found = scan(operator, elements, state, cu_seqlens=[one - start for one in bounds]).prefixes
    return found if gathered is None else _Tied.apply(found, gathered)  # type: ignore[no-untyped-call]


def _check(
    operator: Operator | OperatorPair,
    elements: Tensor,
    pieces: list[tuple[int, int]],
    documents: list[tuple[int, int]],
    rank: int,
    world_size: int,
) -> None:
    if len(pieces) != world_size or any(stop < start for start, stop in pieces):
        raise ValueError(f"cuts must be {world_size + 1} ascending positions, for {world_size} ranks; got {pieces}")
    length = pieces[rank][1] - pieces[rank][0]
    if elements.ndim != 2 or len(elements) != length:
        raise ValueError(f"rank {rank} has a piece of {length} elements; got elements of shape {tuple(elements.shape)}")
    if (documents[0][0], documents[-1][1]) != (pieces[0][0], pieces[-1][1]):
        raise ValueError(f"cu_seqlens must begin and end where cuts do; got {documents[0][0]} … {documents[-1][1]}")
    if any(isinstance(one, torch.nn.Module) and drops(one) for one in operator_pair(operator)):
        raise ValueError("the operator has dropout, which would differ where ranks repeat a merge; set it to 0")


def _document_at(position: int, documents: list[tuple[int, int]]) -> tuple[int, int]:
    return next((first, end) for first, end in documents if first <= position < end)


def _continues(piece: tuple[int, int], documents: list[tuple[int, int]]) -> bool:
    """Whether a document goes on after this piece."""
    return any(first < piece[1] < end for first, end in documents)


def _blocks_sent(piece: tuple[int, int], documents: list[tuple[int, int]]) -> list[_Block]:
    """The largest blocks of what the piece has of the document that goes on after it, in order."""
    start, stop = piece
    if stop == start or not _continues(piece, documents):
        return []
    first = _document_at(stop, documents)[0]
    place, end, blocks = max(start, first) - first, stop - first, []
    while place < end:
        level = (end - place).bit_length() - 1
        if place:
            level = min(level, (place & -place).bit_length() - 1)
        blocks.append(_Block(place, level))
        place += 1 << level
    return blocks


def _state_tables(operator: Operator | OperatorPair, chain: list[tuple[_Block, Rows]]) -> tuple[Rows, Rows]:
    """The blocks and prefixes after a chain of blocks that begins with its document: those of its length's set bits."""
    up, down = operator_pair(operator)
    stack: list[tuple[_Block, Rows]] = []
    for one in chain:
        stack.append(one)
        # Like a binary counter: the levels before the last one only fall, so two equal ones are left and right child.
        while len(stack) > 1 and stack[-2][0].level == stack[-1][0].level:
            (left, left_rows), (_, right_rows) = stack[-2:]
            stack[-2:] = [(_Block(left.start, left.level + 1), up(left_rows, right_rows))]
    prefixes = [stack[0][1]]
    for _, rows in stack[1:]:
        prefixes.append(down(prefixes[-1], rows))
    return torch.cat([rows for _, rows in stack]), torch.cat(prefixes)


class _Gathered(torch.autograd.Function):
    """The rows of all ranks, `[ranks, rows, width]`. In the backward pass, each rank gets the sum of its gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Any) -> Tensor:
        ctx.group = group
        found = rows.new_empty(dist.get_world_size(group), *rows.shape)
        dist.all_gather(list(found.unbind()), rows.contiguous(), group=group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        mine = grad.new_empty(grad.shape[1:])
        dist.reduce_scatter(mine, list(grad.contiguous().unbind()), group=ctx.group)
        return mine, None


class _Tied(torch.autograd.Function):
    """The first tensor. Its gradient reaches the message too, as zeros: all ranks must exchange gradients."""

    @staticmethod
    def forward(ctx: Any, found: Tensor, gathered: Tensor) -> Tensor:
        ctx.shape = gathered.shape
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.new_zeros(ctx.shape)
