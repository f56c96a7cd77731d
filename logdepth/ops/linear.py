"""Linear maps: act(x · Wᵀ + b) + residual. As kernels, gradients of weight and bias are made in float32 at once."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logdepth.ops.activation import ACTIVATIONS, ActivationName
from logdepth.ops.dispatch import backward_by_kernels, on_device_of, use_kernels
from logdepth.ops.precision import cast, product_dtype

TRUNCATION_DEVIATION = 0.87962566103423978
"""Standard deviation of a unit normal truncated at ±2. JAX divides by it, so that samples have the one asked for."""


class Linear(nn.Linear):
    """`nn.Linear` that computes by `ops.linear`."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: ActivationName | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """act(x · Wᵀ + b) + residual, for `x` `[…, in]` and `weight` `[out, in]`."""
    if not use_kernels(x):
        out = F.linear(x, weight, bias)
    else:
        dtype = product_dtype(x)
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        shape = (*x.shape[:-1], len(weight))
        every = (x, weight, bias, residual)
        learns = torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in every)
        if not learns and bias is not None:
            added = None if residual is None else residual.expand(shape).reshape(-1, len(weight))
            return _without_gradients(rows, weight, bias, activation, added).view(shape)
        arguments = (rows, cast(weight, dtype), None if bias is None else cast(bias, dtype), weight, bias)
        out = _Linear.apply(*arguments).view(shape)  # type: ignore[no-untyped-call]
    if activation is not None:
        out = ACTIVATIONS[activation](out)
    return out if residual is None else out + residual


def _without_gradients(
    rows: Tensor, weight: Tensor, bias: Tensor, activation: ActivationName | None, residual: Tensor | None
) -> Tensor:
    from logdepth.ops import few_rows_kernel
    from logdepth.ops.activation_kernel import activate

    weight, bias = cast(weight, rows.dtype), cast(bias, rows.dtype)
    with on_device_of(rows):
        if few_rows_kernel.fits(rows):
            dtype = rows.dtype if residual is None else torch.promote_types(rows.dtype, residual.dtype)
            out = rows.new_empty(len(rows), len(weight), dtype=dtype)
            residual = None if residual is None else residual.contiguous()
            operand, weight = rows.contiguous(), weight.contiguous()
            few_rows_kernel.linear([operand], weight, bias, out, activation=activation or "none", residual=residual)
            return out
        out = torch.addmm(bias, rows, weight.t())
        if activation is not None and len(out):
            activate(out, out, activation=activation, first=0, rate=0.0, seed=out, site=0)  # nothing is random
    return out if residual is None else out + residual


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *_parameters: Tensor | None) -> Tensor:
        ctx.has_bias = bias is not None
        ctx.save_for_backward(x, weight)
        return x @ weight.t() if bias is None else torch.addmm(bias, x, weight.t())

    @staticmethod
    @backward_by_kernels
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from logdepth.ops.column_sums import column_sums

        x, weight = ctx.saved_tensors
        grad = grad.contiguous()
        x_grad = grad @ weight if ctx.needs_input_grad[0] else None
        weight_grad = matrix_grad(grad, x) if ctx.needs_input_grad[3] else None
        bias_grad = column_sums(grad) if ctx.has_bias and ctx.needs_input_grad[4] else None
        return x_grad, None, None, weight_grad, bias_grad


def matrix_grad(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    """leftᵀ · right in float32, added to `total` if it is given."""
    left = left.t()
    if left.is_cuda and left.dtype != torch.float32:
        if total is None:
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    found = (left @ right).float()
    return found if total is None else total.add_(found)


def variance_scaling_(weight: Tensor, scale: float = 1.0) -> Tensor:
    """Fills a `[fan_out, fan_in]` weight as JAX's VarianceScaling(scale, "fan_avg", "truncated_normal") does."""
    fan_out, fan_in = weight.shape
    deviation = math.sqrt(scale / ((fan_in + fan_out) / 2)) / TRUNCATION_DEVIATION
    return nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)


def scaled_linear(in_width: int, out_width: int, scale: float = 1.0) -> Linear:
    """A linear layer with variance-scaled weights and zero bias, as in the papers' JAX code."""
    if min(in_width, out_width) < 1:
        raise ValueError(f"widths must be at least 1; got a layer from {in_width} to {out_width}")
    layer = Linear(in_width, out_width)
    variance_scaling_(layer.weight.data, scale)
    nn.init.zeros_(layer.bias)
    return layer


def identity_linear(width: int) -> Linear:
    """A square linear layer that starts as the identity map."""
    layer = Linear(width, width)
    nn.init.zeros_(layer.weight)
    nn.init.ones_(layer.weight.diagonal())
    nn.init.zeros_(layer.bias)
    return layer
