"""Matrix products of many rows with the activation fused in: for GPUs that copy tiles by themselves (Hopper on).

    out = dropout(act(W · x + b))

A fixed number of programs share the tiles. Sums are in float32, results in the dtype of x.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from logdepth.ops.activation_kernel import Activation, activated
from logdepth.ops.dropout_kernel import keep

ROWS, COLUMNS, DEPTH = 128, 128, 64
"""Of a tile, and of what is multiplied at a time."""
PROGRAMS = 2
"""On a multiprocessor: one computes activations while the other multiplies."""
TILES_TOGETHER = 8
"""Rows of tiles that are computed together, so that what they share stays in the cache."""
FEWEST_ROWS = 2000
"""Far below, there are too few tiles for all multiprocessors, and the library's own products are as fast. Not 2,048: a
level of the down-sweep lacks one merge a row, since the first node of a row has nothing before it."""


def fits(x: Tensor, weight: Tensor) -> bool:
    """Whether these products are made for operands like `x` `[rows, in]` and `weight` `[out, in]`."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and len(x) >= FEWEST_ROWS
        and all(size % DEPTH == 0 for size in weight.shape)
        and x.stride(1) == 1
        and x.stride(0) >= x.shape[1]
        and _copies_tiles(x.device)
    )


def linear_activated(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    out: Tensor,
    *,
    activation: Activation,
    first: int,
    rate: float,
    seed: Tensor,
    site: int,
) -> None:
    """Fills `out` `[rows, out]` from `x` `[rows, in]`; `first` numbers the first row among all of a pass."""
    num_rows, (width, depth) = len(x), weight.shape
    tiles = triton.cdiv(num_rows, ROWS) * triton.cdiv(width, COLUMNS)
    _product[(min(PROGRAMS * _multiprocessors(x.device), tiles),)](
        TensorDescriptor(x, [num_rows, depth], [x.stride(0), 1], [ROWS, DEPTH]),
        TensorDescriptor.from_tensor(weight, [COLUMNS, DEPTH]),
        bias,
        TensorDescriptor.from_tensor(out, [ROWS, COLUMNS // 2]),
        seed,
        first,
        num_rows,
        width,
        depth,
        ROWS,
        COLUMNS,
        DEPTH,
        TILES_TOGETHER,
        activation,
        rate,
        site,
        num_warps=4,
        num_stages=3,
    )


@cache
def _copies_tiles(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@triton.jit(do_not_specialize=["first", "num_rows"])
def _product(
    x,
    weight,
    bias,
    out,
    seed,
    first,
    num_rows,
    width: tl.constexpr,
    depth: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    step: tl.constexpr,
    together: tl.constexpr,
    activation: tl.constexpr,
    rate: tl.constexpr,
    site: tl.constexpr,
):
    across: tl.constexpr = (width + columns - 1) // columns
    down = tl.cdiv(num_rows, rows)
    for tile in tl.range(tl.program_id(0), down * across, tl.num_programs(0), flatten=True):
        top = tile // (together * across) * together
        height = tl.minimum(down - top, together)
        row = (top + tile % (together * across) % height) * rows
        column = tile % (together * across) // height * columns
        total = tl.zeros((rows, columns), tl.float32)
        for k in range(0, depth, step):
            total = tl.dot(x.load([row, k]), weight.load([column, k]).T, total)
        # Results in halves: less memory for them is more for operands on their way.
        left, right = tl.split(tl.permute(tl.reshape(total, (rows, 2, columns // 2)), (0, 2, 1)))
        _finish(left, row, column, bias, out, seed, first, width, rows, columns // 2, activation, rate, site)
        column += columns // 2
        _finish(right, row, column, bias, out, seed, first, width, rows, columns // 2, activation, rate, site)


@triton.jit
def _finish(
    values,
    row,
    column,
    bias,
    out,
    seed,
    first,
    width: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    activation: tl.constexpr,
    rate: tl.constexpr,
    site: tl.constexpr,
):
    """Bias, activation and dropout of a tile, and its results where they belong."""
    at = column + tl.arange(0, columns)
    values += tl.load(bias + at, mask=at < width, other=0.0).to(tl.float32)[None, :]
    place = (first + row + tl.arange(0, rows)).to(tl.int64)[:, None] * width + at[None, :]
    out.store([row, column], keep(activated(values, activation), seed, place, site, rate).to(out.dtype))
