"""Merges of affine maps by kernels: of two matrices of rows, and of a whole up-sweep as one node of the graph."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from logdepth.ops.dispatch import backward_by_kernels, on_device_of
from logdepth.ops.precision import dot_precision
from logdepth.scanning.program import UpProgram
from logdepth.shapes import Rows

if TYPE_CHECKING:
    from logdepth.operators.matrix_affine.matrix_affine import MatrixAffineOperator


def merged_by_kernel(operator: "MatrixAffineOperator", left: Rows, right: Rows) -> Rows:
    """left ⊙ right."""
    merged: Rows = _Merge.apply(_settings(operator), left, right)  # type: ignore[no-untyped-call]
    return merged


def merges_by_kernel(operator: "MatrixAffineOperator", program: UpProgram, inputs: Rows) -> tuple[Rows, Rows]:
    """The inputs, and the results of all merges of an up-sweep."""
    both: tuple[Rows, Rows] = _UpSweep.apply(_settings(operator), program, inputs)  # type: ignore[no-untyped-call]
    return both


def _settings(operator: "MatrixAffineOperator") -> dict[str, Any]:
    key_width, value_width = operator.widths
    return {
        "heads": operator.heads,
        "key_width": key_width,
        "value_width": value_width,
        "precision": dot_precision(),
    }


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: dict[str, Any], left: Tensor, right: Tensor) -> Tensor:
        from logdepth.operators.matrix_affine.merge_kernel import merge

        left, right = left.contiguous(), right.contiguous()
        merged = torch.empty_like(left)
        if len(left):
            with on_device_of(left):
                merge(left, right, None, None, merged, **settings)
        ctx.settings = settings
        ctx.save_for_backward(left, right)
        return merged

    @staticmethod
    @backward_by_kernels
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from logdepth.operators.matrix_affine.merge_kernel import merge_backward

        left, right = ctx.saved_tensors
        total = torch.empty_like(left), torch.empty_like(right)
        if len(left):
            merge_backward(left, right, None, None, grad.contiguous(), None, total, None, **ctx.settings)
        return None, *total


class _UpSweep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, settings: dict[str, Any], program: UpProgram, inputs: Tensor) -> tuple[Tensor, Tensor]:
        from logdepth.operators.matrix_affine.merge_kernel import merge

        rows = inputs.contiguous()
        results = rows.new_empty(program.num_merges, rows.shape[1])
        with on_device_of(rows):
            for call in program.calls:
                made = results[call.first : call.first + call.num_merges]
                merge(rows, results, call.left, call.right, made, **settings)
        ctx.settings, ctx.program = settings, program
        ctx.save_for_backward(rows, results)
        return inputs, results

    @staticmethod
    @backward_by_kernels
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from logdepth.operators.matrix_affine.merge_kernel import merge_backward

        inputs, results = ctx.saved_tensors
        program: UpProgram = ctx.program
        given = grads[0].contiguous(), grads[1].contiguous()
        total = torch.empty_like(inputs), torch.empty_like(results)
        for call in reversed(program.calls):
            part = slice(call.first, call.first + call.num_merges)
            made = total[1][part], program.is_read[part]
            merge_backward(
                inputs, results, call.left, call.right, given[1][part], given, total, made, **ctx.settings
            )  # fmt: skip
        if len(program.lone_inputs):
            total[0].index_copy_(0, program.lone_inputs, given[0].index_select(0, program.lone_inputs))
        return None, None, total[0]
