"""The gate of a GRC merge of few rows, computed in the same kernel as the product that makes its gates.

mixed = σ(g_a) ∘ left + σ(g_b) ∘ right + σ(g_c) ∘ c        [g_a; g_b; g_c; c] = hidden · Wᵀ + b
"""

import triton
import triton.language as tl
from torch import Tensor

from logdepth.ops.activation_kernel import sigmoid
from logdepth.ops.few_rows_kernel import launch_of, padded, plus_product, row_product


def mix(hidden: Tensor, weight: Tensor, bias: Tensor, left: Tensor, right: Tensor, mixed: Tensor) -> None:
    """Fills `mixed` `[rows, width]`, float32, from `hidden` `[rows, depth]` and `weight` `[4 · width, depth]`."""
    (num_rows, width), depth = left.shape, hidden.shape[1]
    columns, step, launch = launch_of(hidden, weight)
    _mix[(triton.cdiv(width, columns // 4),)](
        hidden, weight, bias, left, right, mixed, num_rows, width, depth, padded(num_rows), columns // 4, step,
        **launch,
    )  # fmt: skip


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
        total = row_product(hidden, weights, in_columns, depth, 4 * columns, step, even)[None, :]
    else:
        total = tl.zeros((rows, 4 * columns), tl.float32)
        total = plus_product(total, hidden, weights, num_rows, in_columns, depth, rows, step, even)
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
