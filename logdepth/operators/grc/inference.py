"""One merge of a GRC without gradients, by kernels: for decoding, where a merge has one row per sequence."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from logdepth.operators.grc.few_rows_kernel import mix
from logdepth.operators.grc.gate_kernel import gate
from logdepth.ops import few_rows_kernel
from logdepth.ops.activation import name_of
from logdepth.ops.activation_kernel import activate
from logdepth.ops.dispatch import on_device_of
from logdepth.ops.norm_kernel import fill_normed
from logdepth.ops.precision import cast, product_dtype
from logdepth.shapes import Rows

if TYPE_CHECKING:
    from logdepth.operators.grc.grc import GRC


def merged_by_kernels(grc: "GRC", left: Rows, right: Rows) -> Rows:
    """left ⊙ right, in the dtype of `left`. Nothing is dropped."""
    dtype, activation = product_dtype(left), name_of(grc.activation)
    into, into_bias = cast(grc.hidden.weight, dtype), cast(grc.hidden.bias, dtype)
    out, out_bias = cast(grc.gates.weight, dtype), cast(grc.gates.bias, dtype)
    scale, shift, eps = grc.norm.weight, grc.norm.bias, grc.norm.eps
    left, right = left.contiguous(), right.contiguous()
    merged = torch.empty_like(left)
    with on_device_of(left):
        if 0 < len(left) <= few_rows_kernel.MAX_ROWS:
            hidden = left.new_empty(len(left), len(into), dtype=dtype)
            few_rows_kernel.linear([left, right], into, into_bias, hidden, activation=activation)
            mixed = torch.empty_like(left, dtype=torch.float32)
            mix(hidden, out, out_bias, left, right, mixed)
            fill_normed(mixed, scale, shift, None, merged, eps=eps, silu=False)
        elif len(left):
            states, rows = _interleaved(left, right)
            hidden = torch.addmm(into_bias, states.view(len(left), -1).to(dtype), into.t())
            activate(hidden, hidden, activation=activation, first=0, rate=0.0, seed=hidden, site=0)  # nothing is random
            gates = torch.addmm(out_bias, hidden, out.t())
            gate(gates, states, rows[0], rows[1], scale, shift, eps, merged)
    return merged


def _interleaved(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Left and right operands in turns, `[2 · rows, width]`, and the rows of each of them, `[2, rows]`."""
    num_rows, width = left.shape
    states = torch.stack([left, right], dim=1).view(2 * num_rows, width)
    rows = torch.arange(2 * num_rows, dtype=torch.int32, device=left.device).view(num_rows, 2)
    return states, rows.t().contiguous()
