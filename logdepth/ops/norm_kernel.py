"""LayerNorm with the additions around it, in one pass over the rows. Statistics and sums are in float32.

fill_normed:      act(LN(x) + skip)
residual_normed:  LN(x + dropout(added))
"""

import triton
import triton.language as tl
from torch import Tensor

from logdepth.ops.activation_kernel import activated, slope
from logdepth.ops.dropout_kernel import keep
from logdepth.ops.launch import STAGES, tile_of, tile_warps

SITE = 4
MULTIPROCESSORS, WARPS, MOST = 132, 16, 8
"""Of the largest GPUs: how many, and the warps and programs of these kernels that pay for each."""


def fill_normed(
    x: Tensor, scale: Tensor, shift: Tensor, skip: Tensor | None, out: Tensor, *, eps: float, silu: bool
) -> None:
    """Fills `out` with act(LN(x) + skip); without `silu` there is no activation."""
    num_rows, width = x.shape
    tile = tile_of(width)
    _normed[(triton.cdiv(num_rows, tile[0]),)](
        x, scale, shift, x if skip is None else skip, out, eps, num_rows, width, *tile, skip is not None, silu,
        num_warps=tile_warps(width),
    )  # fmt: skip


def normed_backward(
    grad: Tensor,
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    skip: Tensor | None,
    x_grad: Tensor,
    skip_grad: Tensor | None,
    sums: Tensor,
    *,
    eps: float,
    silu: bool,
) -> None:
    """Fills the gradients of x and skip.

    `sums` `[norm_programs(…), 3 · width]` gets partial sums over rows: of the gradients of scale, shift and x.
    """
    num_rows, width = x.shape
    tile = tile_of(width)
    _normed_backward[(len(sums),)](
        grad, x, scale, shift, x if skip is None else skip, x_grad, x_grad if skip_grad is None else skip_grad, sums,
        eps, num_rows, width, *tile, skip is not None, silu,
        num_warps=tile_warps(width),
    )  # fmt: skip


def norm_programs(num_rows: int, width: int) -> int:
    """How many partial sums `normed_backward` leaves."""
    together = MULTIPROCESSORS * max(1, min(MOST, WARPS // tile_warps(width)))
    return min(-(-num_rows // tile_of(width)[0]), together)


def residual_normed(
    x: Tensor,
    added: Tensor,
    scale: Tensor,
    shift: Tensor,
    out: Tensor,
    *,
    eps: float,
    first: int,
    rate: float,
    seed: Tensor,
) -> None:
    """Fills `out` with LN(x + dropout(added)); `first` numbers the first row among all of a pass."""
    num_rows, width = x.shape
    tile = tile_of(width)
    _residual[(triton.cdiv(num_rows, tile[0]),)](
        x, added, scale, shift, out, seed, eps, first, num_rows, width, *tile, rate, SITE,
        num_warps=tile_warps(width),
    )  # fmt: skip


def residual_normed_backward(
    grad: Tensor,
    x: Tensor,
    added: Tensor,
    scale: Tensor,
    sums: Tensor,
    *,
    eps: float,
    first: int,
    rate: float,
    seed: Tensor,
) -> None:
    """Overwrites `added` by its gradient and `grad` by that of x.

    To `sums` `[norm_programs(…), 3 · width]` partial sums are added: of the gradients of scale, shift and added.
    """
    num_rows, width = x.shape
    tile = tile_of(width)
    _residual_backward[(norm_programs(num_rows, width),)](
        grad, x, added, scale, sums, seed, eps, first, num_rows, width, *tile, rate, SITE, num_warps=tile_warps(width)
    )


@triton.jit
def unit_of(values, inside, width, eps):
    """Rows without mean and with deviation 1, and by what they were multiplied for it."""
    centred = tl.where(inside, values - tl.sum(values, axis=1, keep_dims=True) / width, 0.0)
    deviation = tl.rsqrt(tl.sum(centred * centred, axis=1, keep_dims=True) / width + eps)
    return centred * deviation, deviation


@triton.jit
def unit_grad(grad, unit, deviation, inside, width):
    """From the gradient of such rows to that of what they were made from."""
    inner = tl.sum(grad * unit, axis=1, keep_dims=True) / width
    mean = tl.sum(grad, axis=1, keep_dims=True) / width
    return tl.where(inside, (grad - mean - unit * inner) * deviation, 0.0)


@triton.jit
def add_sums(sums, total, column, width):
    inside = column < width
    tl.store(sums + column, tl.load(sums + column, mask=inside, other=0.0) + tl.sum(total, axis=0), mask=inside)


@triton.jit
def store_sums(sums, total, column, width):
    tl.store(sums + column, tl.sum(total, axis=0), mask=column < width)


@triton.jit
def _normed(
    x,
    scale,
    shift,
    skip,
    out,
    eps,
    num_rows,
    width,
    rows: tl.constexpr,
    block: tl.constexpr,
    has_skip: tl.constexpr,
    silu: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)[:, None]
    column = tl.arange(0, block)[None, :]
    inside = (column < width) & (row < num_rows)
    place = row * width + column
    unit, _ = unit_of(tl.load(x + place, mask=inside, other=0.0).to(tl.float32), inside, width, eps)
    by = tl.load(scale + column, mask=column < width, other=0.0).to(tl.float32)
    value = unit * by + tl.load(shift + column, mask=column < width, other=0.0).to(tl.float32)
    if has_skip:
        value += tl.load(skip + place, mask=inside, other=0.0).to(tl.float32)
    if silu:
        value = activated(value, "silu")
    tl.store(out + place, value, mask=inside)


@triton.jit
def _normed_backward(
    grad,
    x,
    scale,
    shift,
    skip,
    x_grad,
    skip_grad,
    sums,
    eps,
    num_rows,
    width,
    rows: tl.constexpr,
    block: tl.constexpr,
    has_skip: tl.constexpr,
    silu: tl.constexpr,
):
    column = tl.arange(0, block)[None, :]
    by = tl.load(scale + column, mask=column < width, other=0.0).to(tl.float32)
    plus = tl.load(shift + column, mask=column < width, other=0.0).to(tl.float32)
    scale_sum = tl.zeros((rows, block), tl.float32)
    shift_sum = tl.zeros((rows, block), tl.float32)
    x_sum = tl.zeros((rows, block), tl.float32)
    for start in tl.range(tl.program_id(0) * rows, num_rows, tl.num_programs(0) * rows, num_stages=STAGES):
        row = tl.cast(start, tl.int64) + tl.arange(0, rows)[:, None]
        inside = (column < width) & (row < num_rows)
        place = row * width + column
        values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        out = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        more = tl.load(skip + place, mask=inside, other=0.0).to(tl.float32) if has_skip and silu else 0.0
        unit, deviation = unit_of(values, inside, width, eps)
        if silu:
            value = unit * by + plus + more
            out = out * slope(value, "silu")
        if has_skip:
            tl.store(skip_grad + place, out, mask=inside)
        scale_sum += out * unit
        shift_sum += out
        inward = unit_grad(out * by, unit, deviation, inside, width)
        tl.store(x_grad + place, inward, mask=inside)
        x_sum += inward
    own = sums + tl.program_id(0) * 3 * width
    column = tl.arange(0, block)
    store_sums(own, scale_sum, column, width)
    store_sums(own + width, shift_sum, column, width)
    store_sums(own + 2 * width, x_sum, column, width)


@triton.jit(do_not_specialize=["first"])
def _residual(
    x,
    added,
    scale,
    shift,
    out,
    seed,
    eps,
    first,
    num_rows,
    width,
    rows: tl.constexpr,
    block: tl.constexpr,
    rate: tl.constexpr,
    site: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)[:, None]
    column = tl.arange(0, block)[None, :]
    inside = (column < width) & (row < num_rows)
    place = row * width + column
    more = tl.load(added + place, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    unit, _ = unit_of(value + keep(more, seed, first * width + place, site, rate), inside, width, eps)
    by = tl.load(scale + column, mask=column < width, other=0.0).to(tl.float32)
    plus = tl.load(shift + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + place, unit * by + plus, mask=inside)


@triton.jit(do_not_specialize=["first"])
def _residual_backward(
    grad,
    x,
    added,
    scale,
    sums,
    seed,
    eps,
    first,
    num_rows,
    width,
    rows: tl.constexpr,
    block: tl.constexpr,
    rate: tl.constexpr,
    site: tl.constexpr,
):
    column = tl.arange(0, block)[None, :]
    by = tl.load(scale + column, mask=column < width, other=0.0).to(tl.float32)
    scale_sum = tl.zeros((rows, block), tl.float32)
    shift_sum = tl.zeros((rows, block), tl.float32)
    added_sum = tl.zeros((rows, block), tl.float32)
    for start in tl.range(tl.program_id(0) * rows, num_rows, tl.num_programs(0) * rows, num_stages=STAGES):
        row = tl.cast(start, tl.int64) + tl.arange(0, rows)[:, None]
        inside = (column < width) & (row < num_rows)
        place = row * width + column
        at = first * width + place
        more = tl.load(added + place, mask=inside, other=0.0).to(tl.float32)
        value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        unit, deviation = unit_of(value + keep(more, seed, at, site, rate), inside, width, eps)
        out = tl.load(grad + place, mask=inside, other=0.0).to(tl.float32)
        scale_sum += out * unit
        shift_sum += out
        inward = unit_grad(out * by, unit, deviation, inside, width)
        tl.store(grad + place, inward, mask=inside)
        dropped = keep(inward, seed, at, site, rate)
        tl.store(added + place, dropped, mask=inside)
        added_sum += dropped
    own = sums + tl.program_id(0) * 3 * width
    column = tl.arange(0, block)
    add_sums(own, scale_sum, column, width)
    add_sums(own + width, shift_sum, column, width)
    add_sums(own + 2 * width, added_sum, column, width)
