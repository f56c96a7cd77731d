"""A merge of few rows: matrices are read once, and what stands between two products is done where the next one starts.

    linear:  out = act(W · [left; right] + b) + share · residual        either operand by itself, no copy of the pair
    mix:     σ(g_a) ∘ left + σ(g_b) ∘ right + σ(g_c) ∘ c                [g_a; g_b; g_c; c] = W · hidden + b
    settle:  LN of what `mix` left

So few rows cost the time in which weights come in and kernels start. The LayerNorm after `mix` would be a kernel of its
own for a handful of numbers: where there is but one row, each program of the next product normalises it as it reads it
(`Norm`), and the first ones store it where it belongs. Sums and statistics in float32.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from logdepth.kernels.activation import Activation, activated, sigmoid
from logdepth.kernels.launch import block_of, warps_of

MOST_ROWS = 64
"""Beyond, the library's matrix products are faster."""

ROW_COLUMNS, ROW_STEP, ROW_WARPS = 4, 256, 4
"""For one row: a row of the matrix for each warp, eight numbers of it for each thread at a time."""
TILE_COLUMNS, TILE_BYTES, TILE_WARPS, TILE_STAGES = 16, 512, 4, 4
"""For more rows, which are multiplied in tiles: 2,048 rows of a matrix keep 128 multiprocessors busy."""


class Norm(NamedTuple):
    """The LayerNorm that rows still need."""

    scale: Tensor
    shift: Tensor
    eps: float


def fits(x: Tensor) -> bool:
    """Whether a product of the rows `x` is made here rather than by the library, on a GPU and in few bits."""
    return 0 < len(x) <= MOST_ROWS and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def linear(
    operands: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor,
    out: Tensor,
    *,
    activation: Activation | Literal["none"] = "none",
    norm: Norm | None = None,
    settled: Tensor | None = None,
    residual: Tensor | None = None,
    looked_up: Tensor | None = None,
    share: float = 1.0,
) -> None:
    """Fills `out` `[rows, out]` from one or two operands `[rows, width]` and `weight` `[out, operands · width]`.

    norm: of the last operand, one row in float32, which goes to `settled` with it: `[1, width]`, or copies of that.
    residual: added in this share; its rows are those that `looked_up` names, where that is given.
    """
    last = operands[-1]
    num_rows, width = last.shape
    if norm is not None and (num_rows != 1 or settled is None or last.dtype != torch.float32):
        raise ValueError("a norm is applied to one row in float32 that is settled somewhere")
    into = last if settled is None else settled
    scale, shift, eps = (bias, bias, 0.0) if norm is None else norm
    columns, step, launch = _launch(last, weight)
    _linear[(triton.cdiv(len(weight), columns),)](
        operands[0], last, weight, bias, out,
        scale, shift, eps, into, into.stride(0), _copies(into),
        out if residual is None else residual, bias if looked_up is None else looked_up, share,
        num_rows, width, len(weight), block_of(width), len(operands), norm is not None,
        residual is not None, looked_up is not None, activation, _padded(num_rows), columns, step,
        **launch,
    )  # fmt: skip


def mix(hidden: Tensor, weight: Tensor, bias: Tensor, left: Tensor, right: Tensor, mixed: Tensor) -> None:
    """Fills `mixed` `[rows, width]`, float32, from `hidden` `[rows, depth]` and `weight` `[4 · width, depth]`."""
    (num_rows, width), depth = left.shape, hidden.shape[1]
    columns, step, launch = _launch(hidden, weight)
    _mix[(triton.cdiv(width, columns // 4),)](
        hidden, weight, bias, left, right, mixed, num_rows, width, depth, _padded(num_rows), columns // 4, step,
        **launch,
    )  # fmt: skip


def settle(mixed: Tensor, norm: Norm, settled: Tensor) -> None:
    """Fills `settled`, `[rows, width]` or `[copies, rows, width]`, with the LayerNorm of `mixed`."""
    num_rows, width = mixed.shape
    _settle[(num_rows,)](
        mixed, *norm, settled, settled.stride(0), _copies(settled), width, block_of(width), num_warps=warps_of(width, 4)
    )


def _copies(settled: Tensor) -> int:
    return len(settled) if settled.ndim == 3 else 1


def _padded(num_rows: int) -> int:
    """Rows of a tile: one, or as many as tensor cores take."""
    return 1 if num_rows == 1 else max(16, int(triton.next_power_of_2(num_rows)))


def _launch(x: Tensor, weight: Tensor) -> tuple[int, int, dict[str, int]]:
    """Columns of a program, how much of a product is taken at a time, and by how many warps."""
    num_rows, depth = x.shape
    if num_rows == 1:
        return ROW_COLUMNS, min(ROW_STEP, block_of(depth)), {"num_warps": ROW_WARPS}
    step = TILE_BYTES // max(x.element_size(), weight.element_size())
    return TILE_COLUMNS, max(16, min(step, block_of(depth))), {"num_warps": TILE_WARPS, "num_stages": TILE_STAGES}


@triton.jit
def _weights(at, in_columns, k, depth: tl.constexpr, step: tl.constexpr, even_columns: tl.constexpr):
    """Weights `[columns, step]`, zero beyond the matrix; without a mask where there is no beyond."""
    if depth % step == 0 and even_columns:
        tile = tl.load(at + k)
    else:
        tile = tl.load(at + k, mask=in_columns & (k < depth), other=0.0)
    return tile


@triton.jit
def _row_product(
    x,
    weights,
    in_columns,
    depth: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
    even_columns: tl.constexpr,
):
    """One row x times W, `[columns]`; `weights` points to the first number of each row of W, `[columns, 1]`.

    x is read for each row of W anew: in the same shape, numbers are multiplied in the registers that they come to.
    """
    total = tl.zeros((columns, step), tl.float32)
    for start in tl.static_range(0, depth, step):
        k = tl.broadcast_to(start + tl.arange(0, step)[None, :], (columns, step))
        tile = _weights(weights, in_columns, k, depth, step, even_columns)
        values = tl.load(x + k, mask=k < depth, other=0.0)
        total += values.to(tile.dtype).to(tl.float32) * tile.to(tl.float32)
    return tl.sum(total, axis=1)


@triton.jit
def _normed_row_product(
    tile,
    x,
    scale,
    shift,
    eps,
    settled,
    copy_stride,
    num_copies,
    width: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
):
    """The row LN(x) times weights `[columns, block]`; the first programs store it in `num_copies` places."""
    k = tl.broadcast_to(tl.arange(0, block)[None, :], (columns, block))
    values = tl.load(x + k, mask=k < width, other=0.0)
    by = tl.load(scale + k, mask=k < width, other=0.0).to(tl.float32)
    plus = tl.load(shift + k, mask=k < width, other=0.0).to(tl.float32)
    centred = tl.where(k < width, values - tl.sum(values, axis=1, keep_dims=True) / width, 0.0)
    deviation = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / width + eps)
    state = (centred * deviation * by + plus).to(settled.dtype.element_ty)
    copy = tl.program_id(0)
    once = (k < width) & (tl.arange(0, columns)[:, None] == 0)
    while copy < num_copies:
        tl.store(settled + copy * copy_stride + k, state, mask=once)
        copy += tl.num_programs(0)
    return tl.sum(state.to(tile.dtype).to(tl.float32) * tile.to(tl.float32), axis=1)


@triton.jit
def _plus_product(
    total,
    x,
    weights,
    num_rows,
    in_columns,
    depth: tl.constexpr,
    rows: tl.constexpr,
    step: tl.constexpr,
    even_columns: tl.constexpr,
):
    """`total` `[rows, columns]` and x · Wᵀ, in tiles."""
    row = tl.arange(0, rows)[:, None]
    for start in range(0, depth, step):
        k = start + tl.arange(0, step)[None, :]
        tile = _weights(weights, in_columns, k, depth, step, even_columns)
        values = tl.load(x + row * depth + k, mask=(row < num_rows) & (k < depth), other=0.0)
        total = tl.dot(values.to(tile.dtype), tile.T, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_copies", "num_rows"])
def _linear(
    left,
    right,
    weight,
    bias,
    out,
    scale,
    shift,
    eps,
    settled,
    copy_stride,
    num_copies,
    residual,
    looked_up,
    share,
    num_rows,
    width: tl.constexpr,
    out_width: tl.constexpr,
    block: tl.constexpr,
    num_operands: tl.constexpr,
    unsettled: tl.constexpr,
    has_residual: tl.constexpr,
    looks_up: tl.constexpr,
    activation: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
):
    even: tl.constexpr = out_width % columns == 0
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    in_columns = (column < out_width)[:, None]
    weights = weight + column[:, None] * (num_operands * width)
    last = weights + (num_operands - 1) * width
    if rows == 1:
        if unsettled:
            # Weights are on their way before the norm is made: no load passes the barriers of its sums.
            tile = _weights(last, in_columns, tl.arange(0, block)[None, :], width, block, even)
        sums = tl.zeros((columns,), tl.float32)
        if num_operands == 2:
            sums += _row_product(left, weights, in_columns, width, columns, step, even)
        if unsettled:
            sums += _normed_row_product(
                tile, right, scale, shift, eps, settled, copy_stride, num_copies, width, columns, block
            )
        else:
            sums += _row_product(right, last, in_columns, width, columns, step, even)
        total = sums[None, :]
    else:
        total = tl.zeros((rows, columns), tl.float32)
        if num_operands == 2:
            total = _plus_product(total, left, weights, num_rows, in_columns, width, rows, step, even)
        total = _plus_product(total, right, last, num_rows, in_columns, width, rows, step, even)

    row = tl.arange(0, rows)
    inside = (row < num_rows)[:, None] & (column < out_width)[None, :]
    total += tl.load(bias + column, mask=column < out_width, other=0.0).to(tl.float32)[None, :]
    if activation != "none":
        total = activated(total, activation)
    if has_residual:
        source = row
        if looks_up:
            source = tl.load(looked_up + row, mask=row < num_rows, other=0)
        place = source.to(tl.int64)[:, None] * out_width + column[None, :]
        total += share * tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row[:, None] * out_width + column[None, :], total, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _mix(
    hidden,
    weight,
    bias,
    left,
    right,
    mixed,
    num_rows,
    width: tl.constexpr,
    depth: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
):
    even: tl.constexpr = width % columns == 0
    # All four parts of some columns: one product, part by part.
    number = tl.arange(0, 4 * columns)
    of_part = tl.program_id(0) * columns + number % columns
    in_columns = (of_part < width)[:, None]
    gate = number // columns * width + of_part
    weights = weight + gate[:, None] * depth
    if rows == 1:
        total = _row_product(hidden, weights, in_columns, depth, 4 * columns, step, even)[None, :]
    else:
        total = tl.zeros((rows, 4 * columns), tl.float32)
        total = _plus_product(total, hidden, weights, num_rows, in_columns, depth, rows, step, even)
    total += tl.load(bias + gate, mask=of_part < width, other=0.0).to(tl.float32)[None, :]

    even_parts, odd_parts = tl.split(tl.permute(tl.reshape(total, (rows, 2, 2, columns)), (0, 3, 1, 2)))
    left_gate, new_gate = tl.split(even_parts)
    right_gate, new = tl.split(odd_parts)
    row = tl.arange(0, rows)[:, None]
    column = tl.program_id(0) * columns + tl.arange(0, columns)[None, :]
    inside = (row < num_rows) & (column < width)
    place = row * width + column
    one = tl.load(left + place, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(right + place, mask=inside, other=0.0).to(tl.float32)
    values = sigmoid(left_gate) * one + sigmoid(right_gate) * other + sigmoid(new_gate) * new
    tl.store(mixed + place, values, mask=inside)


@triton.jit(do_not_specialize=["num_copies"])
def _settle(mixed, scale, shift, eps, settled, copy_stride, num_copies, width, block: tl.constexpr):
    row = tl.program_id(0)
    column = tl.arange(0, block)
    inside = column < width
    values = tl.load(mixed + row * width + column, mask=inside, other=0.0)
    centred = tl.where(inside, values - tl.sum(values, axis=0) / width, 0.0)
    deviation = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    by = tl.load(scale + column, mask=inside, other=0.0).to(tl.float32)
    plus = tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)
    copy = 0
    while copy < num_copies:
        tl.store(settled + copy * copy_stride + row * width + column, centred * deviation * by + plus, mask=inside)
        copy += 1
