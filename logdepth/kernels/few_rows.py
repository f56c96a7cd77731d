"""A merge of few rows: matrices are read once, and what stands between two products is done where the next one starts.

    linear:  out = act(W · [left; right] + b) + share · residual        either operand by itself, no copy of the pair
    mix:     σ(g_a) ∘ left + σ(g_b) ∘ right + σ(g_c) ∘ c                [g_a; g_b; g_c; c] = W · hidden + b
    settle:  LN of what `mix` left

So few rows cost the time in which weights come in and kernels start. The LayerNorm after `mix` would be a kernel of its
own for a handful of numbers: where rows are very few, each program of the next product normalises them as it reads them
(`Norm`), and the first ones store them where they belong. Sums and statistics in float32.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from logdepth.kernels.activation import Activation, activated
from logdepth.kernels.launch import block_of, warps_of

MOST_ROWS = 64
"""Beyond, the library's matrix products are faster."""
MOST_SUMMED = 4
"""Rows that are multiplied number by number; more of them in tiles, as tensor cores have it."""
COLUMNS = 16
"""Rows of a matrix for each program: 2,048 of them keep 128 multiprocessors busy."""
SUMMED_NUMBERS = 2**14
"""Products of one program at a time: 64 for each thread."""
SUMMED_WARPS = 8
TILE_DEPTH, TILE_WARPS, TILE_STAGES = 128, 4, 4
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Norm(NamedTuple):
    """The LayerNorm that rows still need."""

    scale: Tensor
    shift: Tensor
    eps: float


def normalises_on_load(num_rows: int) -> bool:
    """Whether `linear` takes rows that still need their norm; with more rows it would be read too often."""
    return num_rows <= MOST_SUMMED


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

    norm: of the last operand, float32, which is stored with it in `settled`, `[rows, width]` or `[copies, rows, width]`.
    residual: added in this share; its rows are those that `looked_up` names, where that is given.
    """
    num_rows, width = operands[-1].shape
    rows = _padded(num_rows)
    if norm is None:
        norm, settled = Norm(bias, bias, 0.0), operands[-1]
        unsettled = False
    else:
        assert settled is not None
        assert normalises_on_load(num_rows)
        unsettled = True
    _linear[(triton.cdiv(len(weight), COLUMNS),)](
        operands[0],
        operands[-1],
        weight,
        bias,
        out,
        norm.scale,
        norm.shift,
        norm.eps,
        settled,
        settled.stride(0),
        settled.shape[0] if settled.ndim == 3 else 1,
        out if residual is None else residual,
        bias if looked_up is None else looked_up,
        share,
        num_rows,
        width,
        len(weight),
        block_of(width),
        len(operands),
        unsettled,
        residual is not None,
        looked_up is not None,
        activation,
        rows,
        COLUMNS,
        _step(rows, width),
        rows <= MOST_SUMMED,
        **_launch(rows),
    )


def mix(hidden: Tensor, weight: Tensor, bias: Tensor, left: Tensor, right: Tensor, mixed: Tensor) -> None:
    """Fills `mixed` `[rows, width]`, float32, from `hidden` `[rows, depth]` and `weight` `[4 · width, depth]`."""
    (num_rows, width), depth = left.shape, hidden.shape[1]
    rows = _padded(num_rows)
    _mix[(triton.cdiv(width, COLUMNS // 4),)](
        hidden, weight, bias, left, right, mixed, num_rows, width, depth, rows, COLUMNS // 4, _step(rows, depth),
        rows <= MOST_SUMMED, **_launch(rows),
    )  # fmt: skip


def settle(mixed: Tensor, norm: Norm, settled: Tensor) -> None:
    """Fills `settled`, `[rows, width]` or `[copies, rows, width]`, with the LayerNorm of `mixed`."""
    num_rows, width = mixed.shape
    copies = settled.shape[0] if settled.ndim == 3 else 1
    _settle[(num_rows,)](
        mixed, *norm, settled, settled.stride(0), copies, width, block_of(width), num_warps=warps_of(width)
    )


def _padded(num_rows: int) -> int:
    rows = int(triton.next_power_of_2(num_rows))
    return rows if rows <= MOST_SUMMED else max(16, rows)


def _step(rows: int, depth: int) -> int:
    """How much of a sum is taken at a time: a power of two, and a divisor of the depth where there is a large one."""
    if rows > MOST_SUMMED:
        return max(16, min(TILE_DEPTH, block_of(depth)))
    divisor = depth & -depth
    return min(SUMMED_NUMBERS // (rows * COLUMNS), divisor if divisor >= 256 else block_of(depth))


def _launch(rows: int) -> dict[str, int]:
    if rows > MOST_SUMMED:
        return {"num_warps": TILE_WARPS, "num_stages": TILE_STAGES}
    return {"num_warps": SUMMED_WARPS}


@triton.jit
def _read(at, inside, even: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers, and zero outside; without a mask where there is no outside."""
    if even:
        values = tl.load(at)
    else:
        values = tl.load(at, mask=inside, other=0.0)
    return values


@triton.jit
def _plus_product(total, x, weights, summed: tl.constexpr):  # type: ignore[no-untyped-def]
    """`total` and the product of x `[rows, step]` and weights `[columns, step]`; summed over `step` later, or at once."""
    if summed:
        total += x.to(tl.float32)[:, None, :] * weights.to(tl.float32)[None, :, :]
    else:
        total = tl.dot(x, weights.T, total, input_precision="ieee")
    return total


@triton.jit
def _zeros(rows: tl.constexpr, columns: tl.constexpr, step: tl.constexpr, summed: tl.constexpr):  # type: ignore[no-untyped-def]
    if summed:
        total = tl.zeros((rows, columns, step), tl.float32)
    else:
        total = tl.zeros((rows, columns), tl.float32)
    return total


@triton.jit
def _product(  # type: ignore[no-untyped-def]
    total,
    x,
    weights,
    in_rows,
    in_columns,
    depth: tl.constexpr,
    rows: tl.constexpr,
    step: tl.constexpr,
    even_columns: tl.constexpr,
    summed: tl.constexpr,
):
    """`total` and x · Wᵀ, where `weights` points to the first number of each row of W, `[columns, 1]`."""
    even: tl.constexpr = depth % step == 0
    row = tl.arange(0, rows)[:, None]
    dtype = weights.dtype.element_ty
    if summed:
        for start in tl.static_range(0, depth, step):
            k = start + tl.arange(0, step)[None, :]
            tile = _read(weights + k, in_columns & (k < depth), even and even_columns)
            values = tl.load(x + row * depth + k, mask=in_rows & (k < depth), other=0.0)
            total = _plus_product(total, values.to(dtype), tile, summed)
    else:
        for start in range(0, depth, step):
            k = start + tl.arange(0, step)[None, :]
            tile = _read(weights + k, in_columns & (k < depth), even and even_columns)
            values = tl.load(x + row * depth + k, mask=in_rows & (k < depth), other=0.0)
            total = _plus_product(total, values.to(dtype), tile, summed)
    return total


@triton.jit
def _normed_product(  # type: ignore[no-untyped-def]
    total,
    x,
    weights,
    scale,
    shift,
    eps,
    settled,
    copy_stride,
    num_copies,
    in_rows,
    in_columns,
    width: tl.constexpr,
    block: tl.constexpr,
    rows: tl.constexpr,
    step: tl.constexpr,
    even_columns: tl.constexpr,
):
    """`_product` with LN(x), summed; the first programs store it, in `num_copies` places."""
    even: tl.constexpr = width % step == 0
    row = tl.arange(0, rows)[:, None]
    # Weights are on their way while the norm is made: no load passes the barriers of its sums.
    early = tl.arange(0, step)[None, :]
    first = _read(weights + early, in_columns & (early < width), even and even_columns)

    column = tl.arange(0, block)[None, :]
    inside = in_rows & (column < width)
    values = tl.load(x + row * width + column, mask=inside, other=0.0)
    mean = tl.sum(values, axis=1, keep_dims=True) / width
    centred = tl.where(inside, values - mean, 0.0)
    deviation = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / width + eps)
    copy = tl.program_id(0)
    if copy < num_copies:
        by = tl.load(scale + column, mask=column < width, other=0.0).to(tl.float32)
        plus = tl.load(shift + column, mask=column < width, other=0.0).to(tl.float32)
        while copy < num_copies:
            tl.store(settled + copy * copy_stride + row * width + column, centred * deviation * by + plus, mask=inside)
            copy += tl.num_programs(0)

    for start in tl.static_range(0, width, step):
        k = start + tl.arange(0, step)[None, :]
        if start == 0:
            tile = first
        else:
            tile = _read(weights + k, in_columns & (k < width), even and even_columns)
        part = tl.load(x + row * width + k, mask=in_rows & (k < width), other=0.0)
        by = tl.load(scale + k, mask=k < width, other=0.0).to(tl.float32)
        plus = tl.load(shift + k, mask=k < width, other=0.0).to(tl.float32)
        # Rounded as the state that is stored.
        state = ((part - mean) * deviation * by + plus).to(settled.dtype.element_ty)
        total = _plus_product(total, state.to(weights.dtype.element_ty), tile, True)
    return total


@triton.jit(do_not_specialize=["num_copies", "num_rows"])
def _linear(  # type: ignore[no-untyped-def]
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
    summed: tl.constexpr,
):
    even: tl.constexpr = out_width % columns == 0
    row = tl.arange(0, rows)
    in_rows = (row < num_rows)[:, None]
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    in_columns = (column < out_width)[:, None]
    weights = weight + column[:, None] * (num_operands * width)
    total = _zeros(rows, columns, step, summed)
    if num_operands == 2:
        total = _product(total, left, weights, in_rows, in_columns, width, rows, step, even, summed)
        weights += width
    if unsettled:
        total = _normed_product(
            total, right, weights, scale, shift, eps, settled, copy_stride, num_copies,
            in_rows, in_columns, width, block, rows, step, even,
        )  # fmt: skip
    else:
        total = _product(total, right, weights, in_rows, in_columns, width, rows, step, even, summed)
    if summed:
        total = tl.sum(total, axis=2)

    inside = in_rows & (column < out_width)[None, :]
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
def _mix(  # type: ignore[no-untyped-def]
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
    summed: tl.constexpr,
):
    even: tl.constexpr = width % columns == 0
    row = tl.arange(0, rows)
    in_rows = (row < num_rows)[:, None]
    # All four parts of some columns: one product, part by part.
    number = tl.arange(0, 4 * columns)
    of_part = tl.program_id(0) * columns + number % columns
    in_columns = of_part < width
    gate = number // columns * width + of_part
    total = _zeros(rows, 4 * columns, step, summed)
    weights = weight + gate[:, None] * depth
    total = _product(total, hidden, weights, in_rows, in_columns[:, None], depth, rows, step, even, summed)
    if summed:
        total = tl.sum(total, axis=2)
    total += tl.load(bias + gate, mask=in_columns, other=0.0).to(tl.float32)[None, :]

    even_parts, odd_parts = tl.split(tl.permute(tl.reshape(total, (rows, 2, 2, columns)), (0, 3, 1, 2)))
    left_gate, new_gate = tl.split(even_parts)
    right_gate, new = tl.split(odd_parts)
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    inside = in_rows & (column < width)[None, :]
    place = row[:, None] * width + column[None, :]
    one = tl.load(left + place, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(right + place, mask=inside, other=0.0).to(tl.float32)
    values = tl.sigmoid(left_gate) * one + tl.sigmoid(right_gate) * other + tl.sigmoid(new_gate) * new
    tl.store(mixed + place, values, mask=inside)


@triton.jit(do_not_specialize=["num_copies"])
def _settle(  # type: ignore[no-untyped-def]
    mixed, scale, shift, eps, settled, copy_stride, num_copies, width, block: tl.constexpr
):
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
