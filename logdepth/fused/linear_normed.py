"""Linear maps and LayerNorms with what stands around them, each one node of the graph: a product and a kernel each way.

linear:         W · x + b
normed:         LN(x)
linear_normed:  act(LN(W · x + b) + skip)
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from logdepth.fused.casts import Casts
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


def linear_normed(
    casts: Casts, maps: tuple[nn.Linear, nn.LayerNorm], x: Tensor, *, skip: Tensor | None = None, silu: bool = True
) -> Tensor:
    """`x` and `skip` are `[rows, width]`, in the dtype of the products."""
    map_, norm = maps
    low = (casts[map_.weight], casts[map_.bias])
    arguments = (norm.eps, silu, x, *low, map_.weight, map_.bias, norm.weight, norm.bias, skip)
    return _LinearNormed.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, *_learnt: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.addmm(bias, x, weight.t())

    @staticmethod
    @once_differentiable
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
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, shift = ctx.saved_tensors
        x_grad, _, (scale_grad, shift_grad, _) = _backward_of_norm(grad, x, scale, shift, None, ctx.eps, False)
        return None, None, x_grad, scale_grad, shift_grad


class _LinearNormed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        eps: float,
        silu: bool,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        _learnt_weight: Tensor,
        _learnt_bias: Tensor,
        scale: Tensor,
        shift: Tensor,
        skip: Tensor | None,
    ) -> Tensor:
        mapped = torch.addmm(bias, x, weight.t())
        out = torch.empty_like(mapped)
        fill_normed(mapped, scale, shift, skip, out, eps=eps, silu=silu)
        ctx.eps, ctx.silu = eps, silu
        ctx.save_for_backward(x, weight, mapped, scale, shift, skip)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mapped, scale, shift, skip = ctx.saved_tensors
        mapped_grad, skip_grad, sums = _backward_of_norm(grad, mapped, scale, shift, skip, ctx.eps, ctx.silu)
        scale_grad, shift_grad, bias_grad = sums
        x_grad, weight_grad = mapped_grad @ weight, matrix_grad(mapped_grad, x)
        return None, None, x_grad, None, None, weight_grad, bias_grad, scale_grad, shift_grad, skip_grad


def _backward_of_norm(
    grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, skip: Tensor | None, eps: float, silu: bool
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Gradients of x and skip, and sums over rows of those of scale, shift and x."""
    x_grad = torch.empty_like(x)
    skip_grad = None if skip is None else torch.empty_like(skip)
    sums = torch.empty(norm_programs(len(x), len(scale)), 3 * len(scale), device=x.device)
    normed_backward(grad.contiguous(), x, scale, shift, skip, x_grad, skip_grad, sums, eps=eps, silu=silu)
    return x_grad, skip_grad, torch.split(column_sums(sums), len(scale))
