"""The gate of a GRC merge and its LayerNorm in one pass over the rows; statistics and sums in float32.

[g_a; g_b; g_c; c] = gates[i]        a = states[left[i]], b = states[right[i]]
merged[i] = LN(σ(g_a) ∘ a + σ(g_b) ∘ b + σ(g_c) ∘ c)
"""

import triton
import triton.language as tl
from torch import Tensor

from logdepth.ops.activation_kernel import sigmoid
from logdepth.ops.launch import STAGES, block_of, num_programs, tile_warps, warps_of


def gate(
    gates: Tensor,
    states: Tensor,
    left: Tensor,
    right: Tensor,
    scale: Tensor,
    shift: Tensor,
    eps: float,
    merged: Tensor,
) -> None:
    """Fills `merged`, which may be rows of `states` that no other merge reads."""
    width = states.shape[1]
    _forward[(len(left),)](
        gates, states, left, right, scale, shift, merged, eps, width, block_of(width), num_warps=tile_warps(width),
    )  # fmt: skip


def gate_backward(
    grad: Tensor,
    gates: Tensor,
    states: Tensor,
    left: Tensor,
    right: Tensor,
    scale: Tensor,
    eps: float,
    grads: Tensor,
    sums: Tensor,
) -> None:
    """Overwrites `gates` by their gradients, and adds those of the operands to `grads`.

    To `sums` `[MAX_PROGRAMS, 6 · width]` partial sums over rows are added: of the gradients of gates, scale and shift.
    """
    width = states.shape[1]
    _backward[(num_programs(len(left)),)](
        grad, gates, states, left, right, scale, grads, sums, eps, len(left), width, block_of(width),
        num_warps=warps_of(width, 8),
    )  # fmt: skip


@triton.jit
def _forward(gates, states, left, right, scale, shift, merged, eps, width, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    one = tl.load(states + tl.load(left + row).to(tl.int64) * width + column, mask=inside, other=0.0).to(tl.float32)
    other = tl.load(states + tl.load(right + row).to(tl.int64) * width + column, mask=inside, other=0.0).to(tl.float32)
    at = gates + row * 4 * width + column
    one_gate = sigmoid(tl.load(at, mask=inside, other=0.0).to(tl.float32))
    other_gate = sigmoid(tl.load(at + width, mask=inside, other=0.0).to(tl.float32))
    new_gate = sigmoid(tl.load(at + 2 * width, mask=inside, other=0.0).to(tl.float32))
    new = tl.load(at + 3 * width, mask=inside, other=0.0).to(tl.float32)
    mixed = one_gate * one + other_gate * other + new_gate * new
    centred = tl.where(inside, mixed - tl.sum(mixed, axis=0) / width, 0.0)
    deviation = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
    by = tl.load(scale + column, mask=inside, other=0.0).to(tl.float32)
    plus = tl.load(shift + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(merged + row * width + column, centred * deviation * by + plus, mask=inside)


@triton.jit
def _backward(grad, gates, states, left, right, scale, grads, sums, eps, num_rows, width, block: tl.constexpr):
    program = tl.program_id(0)
    column = tl.arange(0, block)
    inside = column < width
    by = tl.load(scale + column, mask=inside, other=0.0).to(tl.float32)
    one_gate_sum = tl.zeros((block,), tl.float32)
    other_gate_sum = tl.zeros((block,), tl.float32)
    new_gate_sum = tl.zeros((block,), tl.float32)
    new_sum = tl.zeros((block,), tl.float32)
    scale_sum = tl.zeros((block,), tl.float32)
    shift_sum = tl.zeros((block,), tl.float32)
    for number in tl.range(program, num_rows, tl.num_programs(0), num_stages=STAGES):
        row = tl.cast(number, tl.int64)
        at = gates + row * 4 * width + column
        out = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        one_gate = sigmoid(tl.load(at, mask=inside, other=0.0).to(tl.float32))
        other_gate = sigmoid(tl.load(at + width, mask=inside, other=0.0).to(tl.float32))
        new_gate = sigmoid(tl.load(at + 2 * width, mask=inside, other=0.0).to(tl.float32))
        new = tl.load(at + 3 * width, mask=inside, other=0.0).to(tl.float32)
        left_row = tl.load(left + row).to(tl.int64) * width + column
        right_row = tl.load(right + row).to(tl.int64) * width + column
        one = tl.load(states + left_row, mask=inside, other=0.0).to(tl.float32)
        other = tl.load(states + right_row, mask=inside, other=0.0).to(tl.float32)
        one_grad = tl.load(grads + left_row, mask=inside, other=0.0).to(tl.float32)
        other_grad = tl.load(grads + right_row, mask=inside, other=0.0).to(tl.float32)

        mixed = one_gate * one + other_gate * other + new_gate * new
        centred = tl.where(inside, mixed - tl.sum(mixed, axis=0) / width, 0.0)
        deviation = tl.rsqrt(tl.sum(centred * centred, axis=0) / width + eps)
        normed = centred * deviation
        scale_sum += out * normed
        shift_sum += out
        out = out * by
        inner = tl.sum(out * normed, axis=0) / width
        mixed_grad = tl.where(inside, (out - tl.sum(out, axis=0) / width - normed * inner) * deviation, 0.0)

        one_gate_grad = mixed_grad * one * one_gate * (1.0 - one_gate)
        other_gate_grad = mixed_grad * other * other_gate * (1.0 - other_gate)
        new_gate_grad = mixed_grad * new * new_gate * (1.0 - new_gate)
        new_grad = mixed_grad * new_gate
        tl.store(at, one_gate_grad, mask=inside)
        tl.store(at + width, other_gate_grad, mask=inside)
        tl.store(at + 2 * width, new_gate_grad, mask=inside)
        tl.store(at + 3 * width, new_grad, mask=inside)
        one_gate_sum += one_gate_grad
        other_gate_sum += other_gate_grad
        new_gate_sum += new_gate_grad
        new_sum += new_grad

        tl.store(grads + left_row, one_grad + mixed_grad * one_gate, mask=inside)
        tl.store(grads + right_row, other_grad + mixed_grad * other_gate, mask=inside)
    sums_at = sums + program * 6 * width + column
    tl.store(sums_at, tl.load(sums_at, mask=inside, other=0.0) + one_gate_sum, mask=inside)
    tl.store(sums_at + width, tl.load(sums_at + width, mask=inside, other=0.0) + other_gate_sum, mask=inside)
    tl.store(sums_at + 2 * width, tl.load(sums_at + 2 * width, mask=inside, other=0.0) + new_gate_sum, mask=inside)
    tl.store(sums_at + 3 * width, tl.load(sums_at + 3 * width, mask=inside, other=0.0) + new_sum, mask=inside)
    tl.store(sums_at + 4 * width, tl.load(sums_at + 4 * width, mask=inside, other=0.0) + scale_sum, mask=inside)
    tl.store(sums_at + 5 * width, tl.load(sums_at + 5 * width, mask=inside, other=0.0) + shift_sum, mask=inside)
