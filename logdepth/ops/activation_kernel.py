"""The hidden layer of a merge: activation and dropout, forward and backward, in place.

hidden = dropout(act(before))
"""

from typing import Literal

import triton
import triton.language as tl
from torch import Tensor

from logdepth.ops.dropout_kernel import keep
from logdepth.ops.launch import MAX_PROGRAMS, STAGES, block_of, warps_of

Activation = Literal["silu", "relu", "gelu"]
BLOCK = 2048


def activate(
    before: Tensor, hidden: Tensor, *, activation: Activation, first: int, rate: float, seed: Tensor, site: int
) -> None:
    """Fills `hidden`, which may be `before`; `first` numbers the first row among all of a pass."""
    count = before.numel()
    _forward[(triton.cdiv(count, BLOCK),)](
        before, hidden, seed, first * before.shape[1], count, activation, rate, site, BLOCK, num_warps=4
    )


def activate_backward(
    before: Tensor,
    hidden: Tensor,
    sums: Tensor,
    *,
    activation: Activation,
    first: int,
    rate: float,
    seed: Tensor,
    site: int,
) -> None:
    """Where `hidden` holds gradients: they become `hidden` again, and `before` its own gradients.

    To `sums` `[slope_programs(…), width]` partial sums over rows of the gradients of `before` are added.
    """
    num_rows, width = before.shape
    block = min(BLOCK, block_of(width))
    grid = (slope_programs(num_rows, width), triton.cdiv(width, block))
    _backward[grid](
        before, hidden, sums, seed, first, num_rows, width, activation, rate, site, block,
        num_warps=warps_of(block, 8),
    )  # fmt: skip


def slope_programs(num_rows: int, width: int) -> int:
    """How many partial sums `activate_backward` adds to: more where rows are short."""
    return min(num_rows, MAX_PROGRAMS * max(1, BLOCK // block_of(width)))


@triton.jit
def sigmoid(values):
    """1 / (1 + e⁻ˣ), as precise as tl.sigmoid in half as many instructions.

    Powers of two and inverse roots need no care at the ends of their range, as exponentials and quotients do.
    """
    root = tl.rsqrt(1.0 + tl.exp2(values * -1.4426950408889634))
    return root * root


@triton.jit
def activated(values, activation: tl.constexpr):
    if activation == "silu":
        return values * sigmoid(values)
    if activation == "relu":
        return tl.maximum(values, 0.0)
    return values * 0.5 * (1.0 + tl.erf(values * 0.7071067811865476))


@triton.jit
def slope(values, activation: tl.constexpr):
    """The derivative."""
    if activation == "silu":
        gate = sigmoid(values)
        return gate * (1.0 + values * (1.0 - gate))
    if activation == "relu":
        return tl.where(values > 0.0, 1.0, 0.0)
    below = 0.5 * (1.0 + tl.erf(values * 0.7071067811865476))
    return below + values * 0.3989422804014327 * tl.exp(-0.5 * values * values)


@triton.jit(do_not_specialize=["first"])
def _forward(
    before,
    hidden,
    seed,
    first,
    count,
    activation: tl.constexpr,
    rate: tl.constexpr,
    site: tl.constexpr,
    block: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < count
    values = tl.load(before + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(hidden + place, keep(activated(values, activation), seed, first + place, site, rate), mask=inside)


@triton.jit(do_not_specialize=["first"])
def _backward(
    before,
    hidden,
    sums,
    seed,
    first,
    num_rows,
    width,
    activation: tl.constexpr,
    rate: tl.constexpr,
    site: tl.constexpr,
    block: tl.constexpr,
):
    program = tl.program_id(0)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    total = tl.zeros((block,), tl.float32)
    for number in tl.range(program, num_rows, tl.num_programs(0), num_stages=STAGES):
        place = tl.cast(number, tl.int64) * width + column
        values = tl.load(before + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(hidden + place, mask=inside, other=0.0).to(tl.float32)
        at = tl.cast(first, tl.int64) * width + place
        grad = keep(grad, seed, at, site, rate) * slope(values, activation)
        tl.store(hidden + place, keep(activated(values, activation), seed, at, site, rate), mask=inside)
        tl.store(before + place, grad, mask=inside)
        total += grad
    tl.store(
        sums + program * width + column,
        tl.load(sums + program * width + column, mask=inside, other=0.0) + total,
        mask=inside,
    )
