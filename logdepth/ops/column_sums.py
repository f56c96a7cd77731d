"""Column sums in float32 and in a fixed order: of partial sums, or of many rows by way of partial sums."""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, ROWS = 32, 64
"""Of a tile."""
MANY_ROWS = 256
"""From here on rows are shared among programs first."""
SHARES = 32


def column_sums(x: Tensor) -> Tensor:
    """The sum over rows, float32 `[width]`."""
    num_rows, width = x.shape
    shares = SHARES if num_rows >= MANY_ROWS else 1
    sums = torch.empty(shares, width, device=x.device, dtype=torch.float32)
    if width:
        grid = (triton.cdiv(width, COLUMNS), shares)
        _sum[grid](x, sums, num_rows, width, ROWS, COLUMNS, num_warps=4)
    return column_sums(sums) if shares > 1 else sums[0]


@triton.jit
def _sum(x, sums, num_rows, width, rows: tl.constexpr, columns: tl.constexpr):
    column = tl.program_id(0) * columns + tl.arange(0, columns)
    found = tl.zeros((rows, columns), tl.float32)
    start = tl.program_id(1) * rows
    while start < num_rows:
        row = tl.cast(start, tl.int64) + tl.arange(0, rows)[:, None]
        inside = (row < num_rows) & (column < width)[None, :]
        found += tl.load(x + row * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
        start += tl.num_programs(1) * rows
    tl.store(sums + tl.program_id(1) * width + column, tl.sum(found, axis=0), mask=column < width)
