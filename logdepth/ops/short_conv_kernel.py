"""A causal depthwise convolution with SiLU, and its gradients; sums are in float32.

A program computes a tile of tokens and columns. The backward pass computes sums before SiLU again.
"""

import triton
import triton.language as tl
from torch import Tensor

from logdepth.ops.activation_kernel import activated, slope

TOKENS, COLUMNS = 64, 64
"""Of a tile."""
TOKENS_BACKWARD = 32
"""Of a tile of gradients, which takes more registers."""


def convolve(x: Tensor, before: Tensor | None, weight: Tensor, out: Tensor) -> None:
    """Fills `out` from `x` `[rows, length, width]`, `before` `[rows, size − 1, width]` and `weight` `[size, width]`."""
    rows, length, width = x.shape
    grid = (rows * triton.cdiv(length, TOKENS), triton.cdiv(width, COLUMNS))
    _convolve[grid](
        x, x if before is None else before, weight, out, length, width, len(weight), TOKENS, COLUMNS,
        before is not None, num_warps=4,
    )  # fmt: skip


def convolve_backward(
    grad: Tensor, x: Tensor, before: Tensor | None, weight: Tensor, x_grad: Tensor, before_grad: Tensor | None,
    sums: Tensor,
) -> None:  # fmt: skip
    """Fills the gradients of x and before, and partial sums `[num_sums(…), size · width]` of that of the weight."""
    _, length, width = x.shape
    _convolve_backward[(len(sums), triton.cdiv(width, COLUMNS))](
        grad, x, x if before is None else before, weight, x_grad, x_grad if before_grad is None else before_grad, sums,
        length, width, len(weight), TOKENS_BACKWARD, COLUMNS, before is not None,
        num_warps=4,
    )  # fmt: skip


def num_sums(x: Tensor, weight: Tensor) -> int:
    return len(x) * -(-(x.shape[1] + len(weight) - 1) // TOKENS_BACKWARD)


@triton.jit
def window(x, before, row, place, column, length, width, size: tl.constexpr, has_before: tl.constexpr):
    """A tile of what precedes a row and the row itself, in float32, with zeros beyond."""
    token = place - (size - 1)
    inside = column < width
    values = tl.load(
        x + (row * length + token) * width + column, mask=inside & (token >= 0) & (token < length), other=0.0
    ).to(tl.float32)
    if has_before and size > 1:
        early = inside & (token < 0) & (place >= 0)
        values += tl.load(before + (row * (size - 1) + place) * width + column, mask=early, other=0.0).to(tl.float32)
    return values


@triton.jit(do_not_specialize=["length"])
def _convolve(
    x,
    before,
    weight,
    out,
    length,
    width,
    size: tl.constexpr,
    tokens: tl.constexpr,
    columns: tl.constexpr,
    has_before: tl.constexpr,
):
    across = tl.cdiv(length, tokens)
    row = (tl.program_id(0) // across).to(tl.int64)
    token = tl.program_id(0) % across * tokens + tl.arange(0, tokens)[:, None]
    column = tl.program_id(1) * columns + tl.arange(0, columns)[None, :]
    total = tl.zeros((tokens, columns), tl.float32)
    for tap in tl.static_range(size):
        by = tl.load(weight + tap * width + column, mask=column < width, other=0.0).to(tl.float32)
        total += by * window(x, before, row, token + tap, column, length, width, size, has_before)
    inside = (token < length) & (column < width)
    tl.store(out + (row * length + token) * width + column, activated(total, "silu"), mask=inside)


@triton.jit(do_not_specialize=["length"])
def _convolve_backward(
    grad,
    x,
    before,
    weight,
    x_grad,
    before_grad,
    sums,
    length,
    width,
    size: tl.constexpr,
    tokens: tl.constexpr,
    columns: tl.constexpr,
    has_before: tl.constexpr,
):
    across = tl.cdiv(length + size - 1, tokens)
    row = (tl.program_id(0) // across).to(tl.int64)
    place = tl.program_id(0) % across * tokens + tl.arange(0, tokens)[:, None]
    column = tl.program_id(1) * columns + tl.arange(0, columns)[None, :]
    result = tl.zeros((tokens, columns), tl.float32)
    for later in tl.static_range(size):
        token = place - later  # which reads this place with this tap
        total = tl.zeros((tokens, columns), tl.float32)
        for tap in tl.static_range(size):
            by = tl.load(weight + tap * width + column, mask=column < width, other=0.0).to(tl.float32)
            total += by * window(x, before, row, token + tap, column, length, width, size, has_before)
        there = (token >= 0) & (token < length) & (column < width)
        inner = tl.load(grad + (row * length + token) * width + column, mask=there, other=0.0).to(tl.float32)
        inner *= slope(total, "silu")
        by = tl.load(weight + later * width + column, mask=column < width, other=0.0).to(tl.float32)
        result += by * inner
        if later == 0:
            own = sums + tl.program_id(0).to(tl.int64) * size * width + column
            for tap in tl.static_range(size):
                entries = window(x, before, row, token + tap, column, length, width, size, has_before)
                found = tl.sum(inner * entries, axis=0)[None, :]
                tl.store(own + tap * width, found, mask=column < width)
    token = place - (size - 1)
    inside = (token >= 0) & (token < length) & (column < width)
    tl.store(x_grad + (row * length + token) * width + column, result, mask=inside)
    if has_before and size > 1:
        early = (token < 0) & (column < width)
        tl.store(before_grad + (row * (size - 1) + place) * width + column, result, mask=early)
