"""Merges of affine maps of matrices, [M | S] = M_R [M_L | S_L] + [0 | S_R], and their gradients, in tiles of columns.

Operands are rows of two tables: numbers from `num_inputs` on are rows of the second. So the leaves of a tree and what
is made of them need not lie in one matrix. Gradients are of two kinds: `given` is what others than merges want of a
state, and `total` is that together with what the merge wants that reads the state. No state is read by two merges.
"""

import triton
import triton.language as tl
from torch import Tensor

from logdepth.ops.launch import block_of
from logdepth.ops.precision import DotPrecision

COLUMNS = 64
"""Of a tile."""


def merge(
    inputs: Tensor,
    results: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    out: Tensor,
    *,
    heads: int,
    key_width: int,
    value_width: int,
    precision: DotPrecision,
) -> None:
    """Fills `out` with merges of rows of the two tables; without lists, of row i of `inputs` and row i of `results`."""
    columns = _columns(key_width + value_width)
    _merge[(len(out), heads, triton.cdiv(key_width + value_width, columns))](
        inputs, results, out if left is None else left, out if right is None else right, out, len(inputs), heads,
        key_width, value_width, _keys(key_width), columns, left is not None, precision,
        num_warps=_warps(key_width), num_stages=1,
    )  # fmt: skip


def merge_backward(
    inputs: Tensor,
    results: Tensor,
    left: Tensor | None,
    right: Tensor | None,
    grad: Tensor,
    given: tuple[Tensor, Tensor] | None,
    total: tuple[Tensor, Tensor],
    of_result: tuple[Tensor, Tensor] | None,
    *,
    heads: int,
    key_width: int,
    value_width: int,
    precision: DotPrecision,
) -> None:
    """Fills `total` of both tables for all operands of merges of which `grad` is the gradient.

    `given` are gradients of the tables, to which those of these merges are added. `of_result` are the gradients that
    other merges have made of the results of these ones, and which results have them: these count in place of `grad`.
    """
    columns = _columns(key_width + value_width)
    given_inputs, given_results = total if given is None else given
    made, is_made = (grad, grad) if of_result is None else of_result
    _merge_backward[(len(grad), heads, triton.cdiv(key_width + value_width, columns) + 1)](
        inputs, results, grad if left is None else left, grad if right is None else right, grad, made, is_made,
        given_inputs, given_results, *total, len(inputs), heads, key_width, value_width, _keys(key_width), columns,
        left is not None, given is not None, of_result is not None, precision,
        num_warps=_warps(key_width), num_stages=1,
    )  # fmt: skip


def _keys(key_width: int) -> int:
    return max(16, block_of(key_width))


def _columns(width: int) -> int:
    return max(16, min(COLUMNS, block_of(width)))


def _warps(key_width: int) -> int:
    return 4 if key_width <= 64 else 8


@triton.jit
def _row(inputs, results, row, num_inputs, stride):
    """Where a row of the two tables starts."""
    here = inputs + row * stride
    if row >= num_inputs:
        here = results + (row - num_inputs) * stride
    return here


@triton.jit
def _operands(left, right, num_inputs, listed: tl.constexpr):
    one = tl.program_id(0).to(tl.int64)
    other = one + num_inputs
    if listed:
        other = tl.load(right + one).to(tl.int64)
        one = tl.load(left + one).to(tl.int64)
    return one, other


@triton.jit(do_not_specialize=["num_inputs"])
def _merge(
    inputs,
    results,
    left,
    right,
    out,
    num_inputs,
    heads: tl.constexpr,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    keys: tl.constexpr,
    columns: tl.constexpr,
    listed: tl.constexpr,
    precision: tl.constexpr,
):
    width: tl.constexpr = key_width + value_width
    stride: tl.constexpr = heads * key_width * width
    in_row = tl.program_id(1) * (key_width * width)
    one, other = _operands(left, right, num_inputs, listed)
    first = _row(inputs, results, one, num_inputs, stride) + in_row
    then = _row(inputs, results, other, num_inputs, stride) + in_row

    key = tl.arange(0, keys)[:, None]
    across = tl.arange(0, keys)[None, :]
    column = tl.program_id(2) * columns + tl.arange(0, columns)[None, :]
    place = key * width + column
    inside = (key < key_width) & (column < width)
    transition = tl.load(then + key * width + across, mask=(key < key_width) & (across < key_width), other=0.0)
    moved = tl.load(first + place, mask=inside, other=0.0)
    written = tl.load(then + place, mask=inside & (column >= key_width), other=0.0)
    merged = tl.dot(transition, moved, input_precision=precision) + written
    tl.store(out + tl.program_id(0).to(tl.int64) * stride + in_row + place, merged, mask=inside)


@triton.jit(do_not_specialize=["num_inputs"])
def _merge_backward(
    inputs,
    results,
    left,
    right,
    grad,
    made,
    is_made,
    given_inputs,
    given_results,
    total_inputs,
    total_results,
    num_inputs,
    heads: tl.constexpr,
    key_width: tl.constexpr,
    value_width: tl.constexpr,
    keys: tl.constexpr,
    columns: tl.constexpr,
    listed: tl.constexpr,
    adds: tl.constexpr,
    some_made: tl.constexpr,
    precision: tl.constexpr,
):
    width: tl.constexpr = key_width + value_width
    tiles: tl.constexpr = (width + columns - 1) // columns
    stride: tl.constexpr = heads * key_width * width
    in_row = tl.program_id(1) * (key_width * width)
    one, other = _operands(left, right, num_inputs, listed)
    first = _row(inputs, results, one, num_inputs, stride) + in_row
    then = _row(inputs, results, other, num_inputs, stride) + in_row
    first_total = _row(total_inputs, total_results, one, num_inputs, stride) + in_row
    then_total = _row(total_inputs, total_results, other, num_inputs, stride) + in_row
    merge_number = tl.program_id(0).to(tl.int64)
    wanted = grad + merge_number * stride + in_row
    if some_made:  # noqa: SIM102  (known to the compiler)
        if tl.load(is_made + merge_number) != 0:
            wanted = made + merge_number * stride + in_row

    key = tl.arange(0, keys)[:, None]
    across = tl.arange(0, keys)[None, :]
    square = (key < key_width) & (across < key_width)
    square_place = key * width + across
    tile = tl.program_id(2)
    if tile < tiles:  # of the left operand, and of what the right one has written
        column = tile * columns + tl.arange(0, columns)[None, :]
        place = key * width + column
        inside = (key < key_width) & (column < width)
        behind = inside & (column >= key_width)
        # M_R transposed, as it is read.
        across_place = across * width + key
        transition = tl.load(then + across_place, mask=square, other=0.0)
        part = tl.load(wanted + place, mask=inside, other=0.0)
        moved = tl.dot(transition, part, input_precision=precision)
        if adds:
            first_given = _row(given_inputs, given_results, one, num_inputs, stride) + in_row
            then_given = _row(given_inputs, given_results, other, num_inputs, stride) + in_row
            moved += tl.load(first_given + place, mask=inside, other=0.0)
            part += tl.load(then_given + place, mask=behind, other=0.0)
        tl.store(first_total + place, moved, mask=inside)
        tl.store(then_total + place, part, mask=behind)
    else:  # of M_R
        found = tl.zeros((keys, keys), tl.float32)
        for start in range(0, width, columns):
            column = start + tl.arange(0, columns)
            inside = (key < key_width) & (column < width)[None, :]
            part = tl.load(wanted + key * width + column[None, :], mask=inside, other=0.0)
            here = (column < width)[:, None] & (across < key_width)
            operand = tl.load(first + across * width + column[:, None], mask=here, other=0.0)
            found = tl.dot(part, operand, found, input_precision=precision)
        if adds:
            then_given = _row(given_inputs, given_results, other, num_inputs, stride) + in_row
            found += tl.load(then_given + square_place, mask=square, other=0.0)
        tl.store(then_total + square_place, found, mask=square)
