"""A linear map of few rows: the weight is read once, and bias, activation and residual are applied in the same kernel.

    out = act([left; right] · Wᵀ + b) + residual        one operand, or two that need not lie side by side

So few rows cost the time in which weights come in and a kernel starts. Sums are in float32.
"""

from collections.abc import Sequence
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from logdepth.ops.activation_kernel import Activation, activated
from logdepth.ops.launch import block_of

MAX_ROWS = 64
"""With more rows, the library's matrix products are faster."""

ROW_COLUMNS, ROW_STEP, ROW_WARPS = 4, 256, 4
"""For one row: a row of the matrix for each warp, eight elements of it for each thread at a time."""
TILE_COLUMNS, TILE_BYTES, TILE_WARPS, TILE_STAGES = 16, 512, 4, 4
"""For more rows, which are multiplied in tiles: 2,048 rows of a matrix keep 128 multiprocessors busy."""


def fits(x: Tensor) -> bool:
    """Whether this kernel computes a product of the rows `x`: few rows, on a GPU, in a 16-bit dtype."""
    return 0 < len(x) <= MAX_ROWS and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)


def linear(
    operands: Sequence[Tensor],
    weight: Tensor,
    bias: Tensor,
    out: Tensor,
    *,
    activation: Activation | Literal["none"] = "none",
    residual: Tensor | None = None,
) -> None:
    """Fills `out` `[rows, out]` from one or two operands `[rows, width]` and `weight` `[out, operands · width]`."""
    last = operands[-1]
    num_rows, width = last.shape
    columns, step, launch = launch_of(last, weight)
    _linear[(triton.cdiv(len(weight), columns),)](
        operands[0], last, weight, bias, out, out if residual is None else residual,
        num_rows, width, len(weight), len(operands), residual is not None, activation, padded(num_rows), columns, step,
        **launch,
    )  # fmt: skip


def padded(num_rows: int) -> int:
    """Rows of a tile: one, or as many as tensor cores take."""
    return 1 if num_rows == 1 else max(16, int(triton.next_power_of_2(num_rows)))


def launch_of(x: Tensor, weight: Tensor) -> tuple[int, int, dict[str, int]]:
    """Columns of a program, the depth that is multiplied at a time, and the number of warps."""
    num_rows, depth = x.shape
    if num_rows == 1:
        return ROW_COLUMNS, min(ROW_STEP, block_of(depth)), {"num_warps": ROW_WARPS}
    step = TILE_BYTES // max(x.element_size(), weight.element_size())
    return TILE_COLUMNS, max(16, min(step, block_of(depth))), {"num_warps": TILE_WARPS, "num_stages": TILE_STAGES}


@triton.jit
def weights_tile(at, in_columns, k, depth: tl.constexpr, step: tl.constexpr, even_columns: tl.constexpr):
    """Weights `[columns, step]`, zero beyond the matrix; without a mask where there is no beyond."""
    if depth % step == 0 and even_columns:
        tile = tl.load(at + k)
    else:
        tile = tl.load(at + k, mask=in_columns & (k < depth), other=0.0)
    return tile


@triton.jit
def row_product(
    x,
    weights,
    in_columns,
    depth: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
    even_columns: tl.constexpr,
):
    """One row x times Wᵀ: `[columns]`. `weights` points to the first element of each row of W, `[columns, 1]`.

    x is loaded again for every row of W: in the same shape, elements are multiplied in the registers they arrive in.
    """
    total = tl.zeros((columns, step), tl.float32)
    for start in tl.static_range(0, depth, step):
        k = tl.broadcast_to(start + tl.arange(0, step)[None, :], (columns, step))
        tile = weights_tile(weights, in_columns, k, depth, step, even_columns)
        values = tl.load(x + k, mask=k < depth, other=0.0)
        total += values.to(tile.dtype).to(tl.float32) * tile.to(tl.float32)
    return tl.sum(total, axis=1)


@triton.jit
def plus_product(
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
        tile = weights_tile(weights, in_columns, k, depth, step, even_columns)
        values = tl.load(x + row * depth + k, mask=(row < num_rows) & (k < depth), other=0.0)
        total = tl.dot(values.to(tile.dtype), tile.T, total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    left,
    right,
    weight,
    bias,
    out,
    residual,
    num_rows,
    width: tl.constexpr,
    out_width: tl.constexpr,
    num_operands: tl.constexpr,
    has_residual: tl.constexpr,
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
        sums = row_product(right, last, in_columns, width, columns, step, even)
        if num_operands == 2:
            sums += row_product(left, weights, in_columns, width, columns, step, even)
        total = sums[None, :]
    else:
        total = tl.zeros((rows, columns), tl.float32)
        if num_operands == 2:
            total = plus_product(total, left, weights, num_rows, in_columns, width, rows, step, even)
        total = plus_product(total, right, last, num_rows, in_columns, width, rows, step, even)

    row = tl.arange(0, rows)
    inside = (row < num_rows)[:, None] & (column < out_width)[None, :]
    total += tl.load(bias + column, mask=column < out_width, other=0.0).to(tl.float32)[None, :]
    if activation != "none":
        total = activated(total, activation)
    place = row[:, None] * out_width + column[None, :]
    if has_residual:
        total += tl.load(residual + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, total, mask=inside)
