"""Operands of merges, weighed element by element by a LayerNorm, in one pass over the rows; statistics in float32.

weighed = (LN(raw) · scale + shift) ∘ pairs
"""

import triton
import triton.language as tl
from torch import Tensor

from logdepth.ops.launch import tile_of, tile_warps
from logdepth.ops.norm_kernel import add_sums, norm_programs, unit_grad, unit_of


def weigh(raw: Tensor, pairs: Tensor, scale: Tensor, shift: Tensor, weighed: Tensor, *, eps: float) -> None:
    """Fills `weighed`, which may be `raw`."""
    num_rows, width = raw.shape
    tile = tile_of(width)
    _forward[(triton.cdiv(num_rows, tile[0]),)](
        raw, pairs, scale, shift, weighed, eps, num_rows, width, *tile, num_warps=tile_warps(width)
    )


def weigh_backward(
    weighed: Tensor,
    raw: Tensor,
    pairs: Tensor,
    scale: Tensor,
    shift: Tensor,
    pair_grads: Tensor,
    sums: Tensor,
    *,
    eps: float,
) -> None:
    """Where `weighed` holds gradients: it becomes `weighed` again, `raw` its own gradients; fills `pair_grads`.

    To `sums` `[norm_programs(…), 3 · width]` partial sums are added: of the gradients of scale, shift and raw.
    """
    num_rows, width = raw.shape
    tile = tile_of(width)
    _backward[(norm_programs(num_rows, width),)](
        weighed, raw, pairs, scale, shift, pair_grads, sums, eps, num_rows, width, *tile, num_warps=tile_warps(width)
    )


@triton.jit
def _forward(
    raw, pairs, scale, shift, weighed, eps, num_rows, width, rows: tl.constexpr, block: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)[:, None]
    column = tl.arange(0, block)[None, :]
    inside = (column < width) & (row < num_rows)
    place = row * width + column
    values = tl.load(raw + place, mask=inside, other=0.0).to(tl.float32)
    operand = tl.load(pairs + place, mask=inside, other=0.0).to(tl.float32)
    unit, _ = unit_of(values, inside, width, eps)
    by = tl.load(scale + column, mask=column < width, other=0.0).to(tl.float32)
    plus = tl.load(shift + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(weighed + place, (unit * by + plus) * operand, mask=inside)


@triton.jit
def _backward(
    weighed, raw, pairs, scale, shift, pair_grads, sums, eps, num_rows, width, rows: tl.constexpr, block: tl.constexpr
):
    column = tl.arange(0, block)[None, :]
    by = tl.load(scale + column, mask=column < width, other=0.0).to(tl.float32)
    plus = tl.load(shift + column, mask=column < width, other=0.0).to(tl.float32)
    scale_sum = tl.zeros((rows, block), tl.float32)
    shift_sum = tl.zeros((rows, block), tl.float32)
    raw_sum = tl.zeros((rows, block), tl.float32)
    start = tl.program_id(0) * rows
    while start < num_rows:
        row = tl.cast(start, tl.int64) + tl.arange(0, rows)[:, None]
        inside = (column < width) & (row < num_rows)
        place = row * width + column
        # Loads first: the compiler moves some of them down, not all.
        values = tl.load(raw + place, mask=inside, other=0.0).to(tl.float32)
        operand = tl.load(pairs + place, mask=inside, other=0.0).to(tl.float32)
        out = tl.load(weighed + place, mask=inside, other=0.0).to(tl.float32)
        unit, deviation = unit_of(values, inside, width, eps)
        weight = unit * by + plus
        tl.store(weighed + place, weight * operand, mask=inside)
        tl.store(pair_grads + place, weight * out, mask=inside)
        out = out * operand
        scale_sum += out * unit
        shift_sum += out
        inward = unit_grad(out * by, unit, deviation, inside, width)
        tl.store(raw + place, inward, mask=inside)
        raw_sum += inward
        start += tl.num_programs(0) * rows
    own = sums + tl.program_id(0) * 3 * width
    column = tl.arange(0, block)
    add_sums(own, scale_sum, column, width)
    add_sums(own + width, shift_sum, column, width)
    add_sums(own + 2 * width, raw_sum, column, width)
