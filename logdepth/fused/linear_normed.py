"""A linear map, its LayerNorm, a skip and SiLU as one node of the graph: a product and a kernel each way.

    out = act(LN(W · x + b) + skip)
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from logdepth.fused.weights import add_product
from logdepth.kernels.launch import MAX_PROGRAMS
from logdepth.kernels.norm import normed, normed_backward


def linear_normed(
    linear: nn.Linear, norm: nn.LayerNorm, x: Tensor, *, skip: Tensor | None = None, silu: bool = True
) -> Tensor:
    """`x` and `skip` are `[rows, width]`, in the dtype of the products."""
    result: Tensor = _LinearNormed.apply(  # type: ignore[no-untyped-call]
        norm.eps, silu, x, linear.weight, linear.bias, norm.weight, norm.bias, skip
    )
    return result


class _LinearNormed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        eps: float,
        silu: bool,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        scale: Tensor,
        shift: Tensor,
        skip: Tensor | None,
    ) -> Tensor:
        low_weight = weight.to(x.dtype)
        mapped = torch.addmm(bias.to(x.dtype), x, low_weight.t())
        out = torch.empty_like(mapped)
        normed(mapped, scale, shift, skip, out, eps=eps, silu=silu)
        ctx.eps, ctx.silu = eps, silu
        ctx.save_for_backward(x, low_weight, mapped, scale, shift, skip)
        return out

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mapped, scale, shift, skip = ctx.saved_tensors
        mapped_grad = torch.empty_like(mapped)
        skip_grad = None if skip is None else torch.empty_like(skip)
        sums = torch.zeros(MAX_PROGRAMS, 3 * len(scale), device=x.device)
        normed_backward(
            grad.contiguous(), mapped, scale, shift, skip, mapped_grad, skip_grad, sums, eps=ctx.eps, silu=ctx.silu
        )
        scale_grad, shift_grad, bias_grad = sums.sum(0).split(len(scale))
        x_grad = mapped_grad @ weight if ctx.needs_input_grad[2] else None
        weight_grad = add_product(None, mapped_grad, x)
        return None, None, x_grad, weight_grad, bias_grad, scale_grad, shift_grad, skip_grad
