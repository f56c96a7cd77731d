"""A linear map and a LayerNorm, each one node of the graph: a product or a kernel each way."""

from typing import Any

import torch
from torch import Tensor, nn

from logdepth.fused.casts import Casts
from logdepth.fused.once import by_kernels
from logdepth.fused.weights import matrix_grad
from logdepth.kernels.column_sums import column_sums
from logdepth.kernels.norm import fill_normed, norm_programs, normed_backward


def linear(casts: Casts, map_: nn.Linear, x: Tensor) -> Tensor:
    """`x` is `[rows, width]`, in the dtype of the products."""
    arguments = (x, casts[map_.weight], casts[map_.bias], map_.weight, map_.bias)
    return _Linear.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]


def normed(casts: Casts, norm: nn.LayerNorm, x: Tensor) -> Tensor:
    """`[rows, width]` of any dtype, in that of the products."""
    return _Normed.apply(casts.dtype, norm.eps, x, norm.weight, norm.bias)  # type: ignore[no-any-return, no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, *_learnt: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    @by_kernels
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        return grad @ weight, None, None, matrix_grad(grad, x), column_sums(grad)


class _Normed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, eps: float, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x, scale, shift)
        out = torch.empty_like(x, dtype=dtype)
        fill_normed(x, scale, shift, None, out, eps=eps, silu=False)
        return out

    @staticmethod
    @by_kernels
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, shift = ctx.saved_tensors
        x_grad = torch.empty_like(x)
        sums = torch.empty(norm_programs(len(x), len(scale)), 3 * len(scale), device=x.device)
        normed_backward(grad.contiguous(), x, scale, shift, None, x_grad, None, sums, eps=ctx.eps, silu=False)
        scale_grad, shift_grad, _ = torch.split(column_sums(sums), len(scale))
        return None, None, x_grad, scale_grad, shift_grad
