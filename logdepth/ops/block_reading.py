"""Reading the blocks of a tree of memories: o += λ_l q S_l and q ← q M_l, from the latest block to the earliest.

    λ_l = softplus(u·h + (w·h) · l/2 + p·s_l + bias_l + softplus⁻¹(1)),   or 1

The term p·s_l is there if blocks have summaries s_l, which only plain torch reads.
Plain torch reads level by level. The kernel reads all blocks of a piece in one program. It multiplies nearly exactly,
because queries pass through the matrices of many levels; under autocast in TF32, as queries come from 16 bits there.
Merges, of which all later tokens read the results, are nearly exact under autocast too.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from logdepth.ops.dispatch import backward_by_kernels, on_device_of, outside_compiled_graphs, use_kernels
from logdepth.ops.precision import DotPrecision, dot_precision

INVERSE_SOFTPLUS_OF_ONE = math.log(math.expm1(1.0))
MAX_KERNEL_WIDTH = 128
"""Of keys and of values: what a program holds in registers."""


class LevelRead(Protocol):
    """The blocks of one level, and the pieces that read one each."""

    @property
    def level(self) -> int: ...

    @property
    def readers(self) -> Tensor: ...

    @property
    def blocks(self) -> Tensor: ...


class BlockRead(NamedTuple):
    """The same, as it is."""

    level: int
    readers: Tensor
    blocks: Tensor


class ReadIndex(NamedTuple):
    """Who reads which block, as int32 lists on the device: an entry for each read, by piece and then by level."""

    first: Tensor
    """The first entry of each piece, and last the number of entries."""
    block: Tensor
    """The block of each entry."""
    level: Tensor
    """The level of each entry."""
    entry: Tensor
    """The entries again, by block and then by piece."""
    reader: Tensor
    """The piece of each of these."""
    start: Tensor
    """Where the entries of each share of a block start among these, and last their number. Every block has a share."""
    target: Tensor
    """Where the sum over each share goes: to a block, or behind all blocks to a partial sum."""
    summed: Tensor
    """The blocks with partial sums."""
    sum_start: Tensor
    """Where those of each of these start, and last their number."""
    num_partial: int
    nbytes: int


class BlockTable(NamedTuple):
    """Blocks `[rows, heads · key_width · (key_width + value_width)]` in two tables, and who reads them."""

    leaves: Tensor
    merged: Tensor
    reads: ReadIndex


@outside_compiled_graphs
def read_blocks(
    outputs: Tensor,
    queries: Tensor,
    reads: Callable[[], Sequence[LevelRead]],
    table: BlockTable | None,
    slopes: Tensor | None = None,
    level_bias: Tensor | None = None,
    *,
    precision: DotPrecision | None = None,
) -> Tensor:
    """`outputs` and what is read of all blocks, `[pieces, heads, size, value_width]`.

    Args:
        outputs: what tokens have read so far.
        queries: with what they read their first block, `[pieces, heads, size, key_width]`.
        reads: returns the blocks for plain torch, from the latest level on.
        table: the same for the kernel; None: there is none.
        slopes: u·h, w·h and p of the weights λ, `[pieces, heads, size, 2 + summary]`; None: all weights are 1.
        level_bias: bias_l of the weights, `[levels · heads]`; higher levels share the last.
        precision: how the kernel multiplies; by default as `dot_precision()` says.
    """
    if table is None or not has_kernel(queries, outputs.shape[-1]):
        width = queries.shape[1] * queries.shape[-1] * (queries.shape[-1] + outputs.shape[-1])
        for read in reads():
            memories, summaries, weights = read.blocks, read.blocks[:, width:], None
            if summaries.shape[1]:  # otherwise the gradient would be a copy
                memories = memories[:, :width]
            if slopes is not None and level_bias is not None:
                weights = level_weights(read.level, slopes.index_select(0, read.readers), level_bias, summaries)
            outputs, queries = read_level(outputs, queries, read.readers, memories, weights)
        return outputs
    if not len(table.reads.block) or not queries.numel():
        return outputs
    blocks = table.leaves, table.merged
    read_now: Tensor = _ReadBlocks.apply(  # type: ignore[no-untyped-call]
        precision or dot_precision(), table.reads, outputs, queries, slopes, level_bias, *blocks
    )
    return read_now


def has_kernel(queries: Tensor, value_width: int) -> bool:
    """Whether blocks are read by the kernel with such queries."""
    return (
        queries.dtype == torch.float32
        and max(queries.shape[-1], value_width) <= MAX_KERNEL_WIDTH
        and use_kernels(queries)
    )


def read_level(
    outputs: Tensor, queries: Tensor, readers: Tensor, blocks: Tensor, weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Outputs and queries after some pieces have read a block each, `[readers, heads · key_width · …]`."""
    key_width, value_width = queries.shape[-1], outputs.shape[-1]
    matrices = blocks.view(len(blocks), queries.shape[1], key_width, key_width + value_width)
    transition, written = torch.split(matrices, [key_width, value_width], dim=-1)
    own = queries.index_select(0, readers)
    read = own @ written if weights is None else weights * (own @ written)
    return outputs.index_add(0, readers, read), queries.index_copy(0, readers, own @ transition)


def level_weights(level: int, slopes: Tensor, level_bias: Tensor, summaries: Tensor) -> Tensor:
    """λ of a level for tokens `[readers, heads, size, 2 + summary]`, as `[readers, heads, size, 1]`.

    `summaries` are those of the block that each reads, `[readers, heads · summary]`.
    """
    heads = slopes.shape[1]
    level = min(level, len(level_bias) // heads - 1)
    bias = level_bias.view(-1, heads)[level].to(slopes.dtype)
    logit = slopes[..., 0] + slopes[..., 1] * (level / 2) + bias[:, None]
    if summaries.shape[1]:
        logit = logit + (slopes[..., 2:] @ summaries.reshape(len(summaries), heads, -1, 1))[..., 0]
    return F.softplus(logit + INVERSE_SOFTPLUS_OF_ONE)[..., None]


class _ReadBlocks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        precision: DotPrecision,
        index: ReadIndex,
        outputs: Tensor,
        queries: Tensor,
        slopes: Tensor | None,
        level_bias: Tensor | None,
        leaves: Tensor,
        merged: Tensor,
    ) -> Tensor:
        from logdepth.ops.block_reading_kernel import read

        queries, leaves, merged = queries.contiguous(), leaves.contiguous(), merged.contiguous()
        slopes = None if slopes is None else slopes.contiguous()
        out = torch.empty_like(outputs)  # which lies in memory as outputs do, unless these have gaps
        if out.stride() != outputs.stride() or out.stride(-1) != 1:
            outputs, out = outputs.contiguous(), torch.empty_like(outputs, memory_format=torch.contiguous_format)
        with on_device_of(queries):
            read(outputs, queries, slopes, level_bias, leaves, merged, index, out, precision=precision)
        ctx.precision, ctx.index = precision, index
        ctx.save_for_backward(queries, slopes, level_bias, leaves, merged)
        return out

    @staticmethod
    @backward_by_kernels
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from logdepth.ops.block_reading_kernel import block_gradients, read_backward, sums_of
        from logdepth.ops.column_sums import column_sums

        queries, slopes, level_bias, leaves, merged = ctx.saved_tensors
        given = grad if grad.stride(-1) == 1 else grad.contiguous()
        index, precision = ctx.index, ctx.precision
        before = queries.new_empty(len(index.block), *queries.shape[1:])
        after, queries_grad = torch.empty_like(before), torch.empty_like(queries)
        slopes_grad = bias_sums = bias_grad = None
        if slopes is not None:
            slopes_grad = torch.empty_like(slopes)
            bias_sums = queries.new_empty(len(queries) * sums_of(queries.shape[2]), len(level_bias))
        arguments = (given, queries, slopes, level_bias)
        read_backward(
            *arguments, leaves, merged, index, before, after, queries_grad, slopes_grad, bias_sums, precision=precision
        )
        if bias_sums is not None:
            bias_grad = column_sums(bias_sums).to(level_bias.dtype)
        leaves_grad, merged_grad = torch.empty_like(leaves), torch.empty_like(merged)
        block_gradients(*arguments, index, before, after, leaves_grad, merged_grad, precision=precision)
        return None, None, grad, queries_grad, slopes_grad, bias_grad, leaves_grad, merged_grad
