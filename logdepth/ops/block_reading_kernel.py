"""Reading the blocks of all levels in one kernel, and its gradients without atomics.

    read                 o += λ_l q S_l and q ← q M_l, for the blocks of a piece in their order, in registers
    read_backward        the same queries again, which it leaves in memory, and then the blocks in reverse for gradients
    block_gradients      sums over the readers of each block: dM = Σ qᵀ dq', dS = Σ qᵀ (λ do)

A block with many readers is shared among programs, each with a partial sum of its own. Blocks are rows of two tables:
numbers from `num_leaves` on are rows of the second.
"""

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from logdepth.ops.launch import block_of
from logdepth.ops.precision import DotPrecision

if TYPE_CHECKING:
    from logdepth.ops.block_reading import ReadIndex

ROWS = 64
"""Tokens of a program."""
INVERSE_SOFTPLUS_OF_ONE = tl.constexpr(0.5413248546129181)


def read(
    outputs: Tensor,
    queries: Tensor,
    slopes: Tensor | None,
    level_bias: Tensor | None,
    leaves: Tensor,
    merged: Tensor,
    index: "ReadIndex",
    out: Tensor,
    *,
    precision: DotPrecision,
) -> None:
    """Fills `out` with `outputs` `[pieces, heads, size, value_width]` and what is read with `queries`.

    These two lie alike in memory, rows without gaps between their numbers; everything else is contiguous.
    """
    pieces, heads, size, key_width = queries.shape
    rows, keys, values = _tile(size, key_width, outputs.shape[-1])
    num_levels = 1 if level_bias is None else len(level_bias) // heads
    _read[(pieces, heads, triton.cdiv(size, rows))](
        outputs, queries, queries if slopes is None else slopes, queries if level_bias is None else level_bias,
        leaves, merged, index.first, index.block, index.level, out, len(leaves), num_levels, size,
        *outputs.stride()[:3], heads, key_width, outputs.shape[-1], rows, keys, values, slopes is not None, precision,
        num_warps=_warps(keys, values), num_stages=1,
    )  # fmt: skip


def read_backward(
    grad: Tensor,
    queries: Tensor,
    slopes: Tensor | None,
    level_bias: Tensor | None,
    leaves: Tensor,
    merged: Tensor,
    index: "ReadIndex",
    before: Tensor,
    after: Tensor,
    queries_grad: Tensor,
    slopes_grad: Tensor | None,
    bias_sums: Tensor | None,
    *,
    precision: DotPrecision,
) -> None:
    """Fills gradients of queries and slopes, and partial sums of those of `level_bias`: a row for each `sums_of`.

    For each block that a piece reads, `before` `[entries, heads, size, key_width]` gets the queries, but for its first
    one, and `after` the gradient of the queries that are passed on, but for its last one.
    """
    pieces, heads, size, key_width = queries.shape
    value_width = grad.shape[-1]
    rows, keys, values = _tile(size, key_width, value_width)
    num_levels = 1 if level_bias is None else len(level_bias) // heads
    weighted = slopes is not None
    unused = queries
    _read_backward[(pieces, heads, triton.cdiv(size, rows))](
        grad, queries, slopes if weighted else unused, level_bias if weighted else unused,
        leaves, merged, index.first, index.block, index.level, before, after, queries_grad,
        slopes_grad if weighted else unused, bias_sums if weighted else unused, len(leaves), num_levels, size,
        *grad.stride()[:3], heads, key_width, value_width, rows, keys, values,
        block_of(num_levels), weighted, precision,
        num_warps=_warps(keys, values), num_stages=1,
    )  # fmt: skip


def sums_of(size: int) -> int:
    """The partial sums of a piece, of all heads and levels each."""
    return int(triton.cdiv(size, _tile(size, 1, 1)[0]))


def block_gradients(
    grad: Tensor,
    queries: Tensor,
    slopes: Tensor | None,
    level_bias: Tensor | None,
    index: "ReadIndex",
    before: Tensor,
    after: Tensor,
    leaves_grad: Tensor,
    merged_grad: Tensor,
    *,
    precision: DotPrecision,
) -> None:
    """Fills the gradients of all rows of both tables. `before` and `after` are those of `read_backward`."""
    _, heads, size, key_width = queries.shape
    value_width = grad.shape[-1]
    rows, keys, values = _tile(size, key_width, value_width)
    num_levels = 1 if level_bias is None else len(level_bias) // heads
    weighted = slopes is not None
    partial = torch.empty(index.num_partial, leaves_grad.shape[1], device=grad.device)
    _block_gradients[(len(index.target), heads)](
        grad, queries, slopes if weighted else queries, level_bias if weighted else queries,
        index.first, index.level, index.start, index.target, index.entry, index.reader, before, after,
        leaves_grad, merged_grad, partial, len(leaves_grad), len(merged_grad), num_levels, size,
        *grad.stride()[:3], heads, key_width, value_width, rows, keys, values, weighted, precision,
        num_warps=_warps(keys, values), num_stages=1,
    )  # fmt: skip
    if index.num_partial:
        width, block = key_width * (key_width + value_width), 1024
        _sum_partial[(len(index.summed), triton.cdiv(heads * width, block))](
            partial, leaves_grad, merged_grad, index.summed, index.sum_start, len(leaves_grad), heads * width, block,
            num_warps=4,
        )  # fmt: skip


def _tile(size: int, key_width: int, value_width: int) -> tuple[int, int, int]:
    """Tokens, keys and values that tiles have room for.

    Where either width is above 64, both have room for 64: on an H200 with Triton 3.6, products of 64 rows over a width
    of 16 are wrong on 8 warps, by 1e-4 or by a third.
    """
    least = 64 if max(key_width, value_width) > 64 else 16
    return max(16, min(ROWS, block_of(size))), max(least, block_of(key_width)), max(least, block_of(value_width))


def _warps(keys: int, values: int) -> int:
    return 4 if max(keys, values) <= 64 else 8


@triton.jit
def _row(leaves, merged, row, num_leaves, stride):
    """Where a row of the two tables starts."""
    here = leaves + row * stride
    if row >= num_leaves:
        here = merged + (row - num_leaves) * stride
    return here


@triton.jit
def _logit(slopes, level_bias, token, size, level, head, num_levels, heads: tl.constexpr):
    """Of the weights of a level for some tokens, and the factor of their second slope."""
    known = tl.minimum(level, num_levels - 1)
    half = known.to(tl.float32) * 0.5
    constant = tl.load(slopes + 2 * token, mask=token < size, other=0.0)
    slope = tl.load(slopes + 2 * token + 1, mask=token < size, other=0.0)
    bias = tl.load(level_bias + known * heads + head).to(tl.float32)
    return constant + slope * half + bias + INVERSE_SOFTPLUS_OF_ONE, half


@triton.jit
def _softplus(x):
    power = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + power
    # log(1 + p) loses what 1 + p rounds off; the quotient gives it back.
    small = tl.where(above == 1.0, power, tl.log(above) * (power / tl.where(above == 1.0, 1.0, above - 1.0)))
    return tl.where(x > 20.0, x, small)


@triton.jit(do_not_specialize=["num_leaves", "num_levels", "size"])
def _read(
    outputs,
    queries,
    slopes,
    level_bias,
    leaves,
    merged,
    firsts,
    blocks,
    levels,
    out,
    num_leaves,
    num_levels,
    size,
    piece_stride,
    head_stride,
    token_stride,
    heads: tl.constexpr,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    rows: tl.constexpr,
    keys: tl.constexpr,
    values: tl.constexpr,
    weighted: tl.constexpr,
    precision: tl.constexpr,
):
    width: tl.constexpr = key_width + value_width
    stride: tl.constexpr = heads * key_width * width
    piece, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.program_id(2) * rows + tl.arange(0, rows)
    place = (piece * heads + head) * size
    key, across, column = tl.arange(0, keys), tl.arange(0, keys), tl.arange(0, values)
    in_value = token[:, None] * token_stride + column[None, :]
    of_query = (token < size)[:, None] & (across < key_width)[None, :]
    of_value = (token < size)[:, None] & (column < value_width)[None, :]
    in_query = token[:, None] * key_width + across[None, :]
    is_key = key < key_width
    in_transition = is_key[:, None] & (across < key_width)[None, :]
    in_written = is_key[:, None] & (column < value_width)[None, :]

    query = tl.load(queries + place * key_width + in_query, mask=of_query, other=0.0)
    total = tl.load(outputs + piece * piece_stride + head * head_stride + in_value, mask=of_value, other=0.0)
    first, end = tl.load(firsts + piece), tl.load(firsts + piece + 1)
    for entry in range(first, end):
        if entry > first:
            block = _row(leaves, merged, tl.load(blocks + entry - 1).to(tl.int64), num_leaves, stride)
            block += head * key_width * width
            transition = tl.load(block + key[:, None] * width + across[None, :], mask=in_transition, other=0.0)
            query = tl.dot(query, transition, input_precision=precision)
        block = _row(leaves, merged, tl.load(blocks + entry).to(tl.int64), num_leaves, stride)
        block += head * key_width * width
        written = tl.load(block + key[:, None] * width + key_width + column[None, :], mask=in_written, other=0.0)
        if weighted:
            level = tl.load(levels + entry)
            logit, _ = _logit(slopes + 2 * place, level_bias, token, size, level, head, num_levels, heads)
            total += _softplus(logit)[:, None] * tl.dot(query, written, input_precision=precision)
        else:
            total = tl.dot(query, written, total, input_precision=precision)
    tl.store(out + piece * piece_stride + head * head_stride + in_value, total, mask=of_value)


@triton.jit(do_not_specialize=["num_leaves", "num_levels", "size"])
def _read_backward(
    grad,
    queries,
    slopes,
    level_bias,
    leaves,
    merged,
    firsts,
    blocks,
    levels,
    before,
    after,
    queries_grad,
    slopes_grad,
    bias_sums,
    num_leaves,
    num_levels,
    size,
    piece_stride,
    head_stride,
    token_stride,
    heads: tl.constexpr,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    rows: tl.constexpr,
    keys: tl.constexpr,
    values: tl.constexpr,
    levels_block: tl.constexpr,
    weighted: tl.constexpr,
    precision: tl.constexpr,
):
    width: tl.constexpr = key_width + value_width
    stride: tl.constexpr = heads * key_width * width
    piece, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tl.program_id(2) * rows + tl.arange(0, rows)
    place = (piece * heads + head) * size
    key, across, column = tl.arange(0, keys), tl.arange(0, keys), tl.arange(0, values)
    in_value = token[:, None] * token_stride + column[None, :]
    of_query = (token < size)[:, None] & (across < key_width)[None, :]
    of_value = (token < size)[:, None] & (column < value_width)[None, :]
    in_query = (head * size + token)[:, None] * key_width + across[None, :]
    square = (key < key_width)[:, None] & (across < key_width)[None, :]
    first, end = tl.load(firsts + piece), tl.load(firsts + piece + 1)
    entries_stride = size.to(tl.int64) * (heads * key_width)

    own = queries + piece * entries_stride
    query = tl.load(own + in_query, mask=of_query, other=0.0)
    for entry in range(first, end - 1):
        block = _row(leaves, merged, tl.load(blocks + entry).to(tl.int64), num_leaves, stride)
        block += head * key_width * width
        transition = tl.load(block + key[:, None] * width + across[None, :], mask=square, other=0.0)
        query = tl.dot(query, transition, input_precision=precision)
        tl.store(before + (entry + 1) * entries_stride + in_query, query, mask=of_query)
    tl.debug_barrier()  # threads read what others have written

    inward = tl.zeros((rows, keys), tl.float32)
    constant_grad = tl.zeros((rows,), tl.float32)
    slope_grad = tl.zeros((rows,), tl.float32)
    number = tl.arange(0, levels_block)
    bias_sum = tl.zeros((levels_block,), tl.float32)
    for back in range(end - first):
        entry = end - 1 - back
        block = _row(leaves, merged, tl.load(blocks + entry).to(tl.int64), num_leaves, stride)
        block += head * key_width * width
        if back > 0:  # M and S are read transposed
            tl.store(after + entry * entries_stride + in_query, inward, mask=of_query)
            transition = tl.load(block + across[None, :] * width + key[:, None], mask=square, other=0.0)
            inward = tl.dot(inward, transition, input_precision=precision)
        in_written = (column < value_width)[:, None] & (across < key_width)[None, :]
        written_place = across[None, :] * width + key_width + column[:, None]
        written = tl.load(block + written_place, mask=in_written, other=0.0)
        read = tl.load(grad + piece * piece_stride + head * head_stride + in_value, mask=of_value, other=0.0)
        if weighted:
            wanted = tl.dot(read, written, input_precision=precision)
            level = tl.load(levels + entry)
            logit, half = _logit(slopes + 2 * place, level_bias, token, size, level, head, num_levels, heads)
            own = before + entry * entries_stride if entry > first else queries + piece * entries_stride
            query = tl.load(own + in_query, mask=of_query, other=0.0)
            logit_grad = tl.sum(query * wanted, axis=1) * tl.sigmoid(logit)
            constant_grad += logit_grad
            slope_grad += half * logit_grad
            bias_sum += tl.where(number == tl.minimum(level, num_levels - 1), tl.sum(logit_grad, axis=0), 0.0)
            inward += _softplus(logit)[:, None] * wanted
        else:
            inward = tl.dot(read, written, inward, input_precision=precision)
    tl.store(queries_grad + piece * entries_stride + in_query, inward, mask=of_query)
    if weighted:
        of_slopes = slopes_grad + 2 * place + 2 * token
        tl.store(of_slopes, constant_grad, mask=token < size)
        tl.store(of_slopes + 1, slope_grad, mask=token < size)
        sums = bias_sums + (piece * tl.num_programs(2) + tl.program_id(2)) * (num_levels * heads)
        tl.store(sums + number * heads + head, bias_sum, mask=number < num_levels)


@triton.jit(do_not_specialize=["num_leaves", "num_merged", "num_levels", "size"])
def _block_gradients(
    grad,
    queries,
    slopes,
    level_bias,
    firsts,
    levels,
    starts,
    targets,
    entries,
    readers,
    before,
    after,
    leaves_grad,
    merged_grad,
    partial,
    num_leaves,
    num_merged,
    num_levels,
    size,
    piece_stride,
    head_stride,
    token_stride,
    heads: tl.constexpr,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    rows: tl.constexpr,
    keys: tl.constexpr,
    values: tl.constexpr,
    weighted: tl.constexpr,
    precision: tl.constexpr,
):
    width: tl.constexpr = key_width + value_width
    stride: tl.constexpr = heads * key_width * width
    entries_stride = size.to(tl.int64) * (heads * key_width)
    share, head = tl.program_id(0), tl.program_id(1)
    key, across, column = tl.arange(0, keys), tl.arange(0, keys), tl.arange(0, values)
    transition = tl.zeros((keys, keys), tl.float32)
    written = tl.zeros((keys, values), tl.float32)
    for number in range(tl.load(starts + share), tl.load(starts + share + 1)):
        entry, piece = tl.load(entries + number).to(tl.int64), tl.load(readers + number).to(tl.int64)
        is_first, is_last = entry == tl.load(firsts + piece), entry + 1 == tl.load(firsts + piece + 1)
        place = (piece * heads + head) * size
        own = before + entry * entries_stride
        if is_first:
            own = queries + piece * entries_stride
        for start in range(0, size, rows):
            token = start + tl.arange(0, rows)
            # Queries transposed.
            turned = (head * size + token)[None, :] * key_width + key[:, None]
            query = tl.load(own + turned, mask=(token < size)[None, :] & (key < key_width)[:, None], other=0.0)
            inside = (token < size)[:, None] & (column < value_width)[None, :]
            in_value = token[:, None] * token_stride + column[None, :]
            read = tl.load(grad + piece * piece_stride + head * head_stride + in_value, mask=inside, other=0.0)
            if weighted:
                level = tl.load(levels + entry)
                logit, _ = _logit(slopes + 2 * place, level_bias, token, size, level, head, num_levels, heads)
                read *= _softplus(logit)[:, None]
            written = tl.dot(query, read, written, input_precision=precision)
            if not is_last:
                in_query = (head * size + token)[:, None] * key_width + across[None, :]
                of_query = (token < size)[:, None] & (across < key_width)[None, :]
                inward = tl.load(after + entry * entries_stride + in_query, mask=of_query, other=0.0)
                transition = tl.dot(query, inward, transition, input_precision=precision)
    target = tl.load(targets + share).to(tl.int64)
    out = _row(leaves_grad, merged_grad, target, num_leaves, stride)
    if target >= num_leaves + num_merged:
        out = partial + (target - num_leaves - num_merged) * stride
    out += head * key_width * width + key[:, None] * width
    is_key = (key < key_width)[:, None]
    tl.store(out + across[None, :], transition, mask=is_key & (across < key_width)[None, :])
    tl.store(out + key_width + column[None, :], written, mask=is_key & (column < value_width)[None, :])


@triton.jit(do_not_specialize=["num_leaves"])
def _sum_partial(
    partial, leaves_grad, merged_grad, summed, starts, num_leaves, stride: tl.constexpr, block: tl.constexpr
):
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < stride
    found = tl.zeros((block,), tl.float32)
    for row in range(tl.load(starts + tl.program_id(0)), tl.load(starts + tl.program_id(0) + 1)):
        found += tl.load(partial + tl.cast(row, tl.int64) * stride + column, mask=inside, other=0.0)
    target = tl.load(summed + tl.program_id(0)).to(tl.int64)
    tl.store(_row(leaves_grad, merged_grad, target, num_leaves, stride) + column, found, mask=inside)
