"""Rows and whole tensors in one pass each, where the library takes several.

scaled:        x · factor, for a factor in float32 on the device, whatever the dtype of x
scatter_rows:  x[row[i]] = values[i]
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from logdepth.ops.launch import block_of, tile_warps

BLOCK = 4096


def scaled(x: Tensor, factor: Tensor) -> Tensor:
    """x · factor in the dtype of x, which is contiguous."""
    out = torch.empty_like(x)
    _scale[(triton.cdiv(x.numel(), BLOCK),)](x, factor, out, x.numel(), BLOCK, num_warps=8)
    return out


def scatter_rows(x: Tensor, rows: Tensor, values: Tensor) -> None:
    """Overwrites the given rows of x, none of them twice."""
    width = x.shape[1]
    if len(rows):
        _scatter[(len(rows),)](x, rows, values, width, block_of(width), num_warps=tile_warps(width))


@triton.jit
def _scale(x, factor, out, count, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < count
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, values * tl.load(factor).to(tl.float32), mask=inside)


@triton.jit
def _scatter(x, rows, values, width, block: tl.constexpr):
    number = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    row = tl.load(rows + number)
    tl.store(x + row * width + column, tl.load(values + number * width + column, mask=inside), mask=inside)
