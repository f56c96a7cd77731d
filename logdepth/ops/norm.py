"""Norms: act(LN(x) + skip), the same after a linear map, and RMS norm. The kernel reads each row once, in float32."""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logdepth.ops.activation import ACTIVATIONS
from logdepth.ops.dispatch import backward_by_kernels, is_unmodified, on_device_of, use_kernels
from logdepth.ops.linear import Linear, matrix_grad, scaled_linear
from logdepth.ops.precision import cast, product_dtype

NormName = Literal["layer", "rms"]


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` over the last dimension that computes by `ops.layer_norm`."""

    def forward(self, x: Tensor, *, skip: Tensor | None = None, activation: Literal["silu"] | None = None) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps, skip=skip, activation=activation)


class RMSNorm(nn.RMSNorm):
    """x / RMS(x) · scale over the last dimension; its result has the dtype of matrix products with x."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype)).to(product_dtype(x))


class NormedLinear(nn.Sequential):
    """act(LN(W · x + b) + skip) with variance-scaled weights; as kernels, one node of the graph."""

    def __init__(self, in_width: int, out_width: int) -> None:
        super().__init__(scaled_linear(in_width, out_width), LayerNorm(out_width))

    def forward(self, x: Tensor, *, skip: Tensor | None = None, activation: Literal["silu"] | None = None) -> Tensor:
        linear, norm = self
        if not (use_kernels(x) and is_unmodified(self, {"": NormedLinear, "0": Linear, "1": LayerNorm})):
            return _skipped(norm(linear(x)), skip, activation)
        assert isinstance(linear, Linear)
        assert isinstance(norm, LayerNorm)
        dtype = product_dtype(x)
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        width = len(linear.weight)
        skip = None if skip is None else skip.reshape(-1, width).to(dtype).contiguous()
        low = cast(linear.weight, dtype), cast(linear.bias, dtype)
        out = _NormedLinear.apply(  # type: ignore[no-untyped-call]
            norm.eps, activation is not None, *low, rows, skip, linear.weight, linear.bias, norm.weight, norm.bias
        )
        return out.view(*x.shape[:-1], width)  # type: ignore[no-any-return]


def norm_named(name: NormName, width: int) -> nn.Module:
    """A norm over the last dimension."""
    return LayerNorm(width) if name == "layer" else RMSNorm(width, eps=1e-6)


def layer_norm(
    x: Tensor,
    scale: Tensor | None,
    shift: Tensor | None,
    eps: float = 1e-5,
    *,
    skip: Tensor | None = None,
    activation: Literal["silu"] | None = None,
) -> Tensor:
    """act(LN(x) + skip) over the last dimension. As a kernel, the result has the dtype of matrix products with x."""
    if scale is None or shift is None or not use_kernels(x):
        return _skipped(F.layer_norm(x, x.shape[-1:], scale, shift, eps), skip, activation)
    dtype = product_dtype(x)
    rows = x.reshape(-1, x.shape[-1])
    skip_rows = None if skip is None else skip.reshape(rows.shape).to(dtype).contiguous()
    arguments = (dtype, eps, activation is not None, rows, scale, shift, skip_rows)
    normed: Tensor = _LayerNorm.apply(*arguments)  # type: ignore[no-untyped-call]
    return normed.view(x.shape)


def _skipped(normed: Tensor, skip: Tensor | None, activation: Literal["silu"] | None) -> Tensor:
    """act(normed + skip)."""
    out = normed if skip is None else skip + normed
    return out if activation is None else ACTIVATIONS[activation](out)


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        dtype: torch.dtype,
        eps: float,
        silu: bool,
        x: Tensor,
        scale: Tensor,
        shift: Tensor,
        skip: Tensor | None,
    ) -> Tensor:
        ctx.eps, ctx.silu = eps, silu
        ctx.save_for_backward(x, scale, shift, skip)
        return _normed(x, scale, shift, skip, dtype, eps, silu)

    @staticmethod
    @backward_by_kernels
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, shift, skip = ctx.saved_tensors
        x_grad, scale_grad, shift_grad, _, skip_grad = _normed_backward(grad, x, scale, shift, skip, ctx.eps, ctx.silu)
        return None, None, None, x_grad, scale_grad, shift_grad, skip_grad


class _NormedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        eps: float,
        silu: bool,
        weight: Tensor,
        bias: Tensor,
        x: Tensor,
        skip: Tensor | None,
        _weight: Tensor,
        _bias: Tensor,
        scale: Tensor,
        shift: Tensor,
    ) -> Tensor:
        mapped = torch.addmm(bias, x, weight.t())
        ctx.eps, ctx.silu = eps, silu
        ctx.save_for_backward(weight, x, mapped, scale, shift, skip)
        return _normed(mapped, scale, shift, skip, mapped.dtype, eps, silu)

    @staticmethod
    @backward_by_kernels
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, x, mapped, scale, shift, skip = ctx.saved_tensors
        mapped_grad, scale_grad, shift_grad, bias_grad, skip_grad = _normed_backward(
            grad, mapped, scale, shift, skip, ctx.eps, ctx.silu
        )
        x_grad = mapped_grad @ weight if ctx.needs_input_grad[4] else None
        weight_grad = matrix_grad(mapped_grad, x)
        return None, None, None, None, x_grad, skip_grad, weight_grad, bias_grad, scale_grad, shift_grad


def _normed(
    x: Tensor, scale: Tensor, shift: Tensor, skip: Tensor | None, dtype: torch.dtype, eps: float, silu: bool
) -> Tensor:
    from logdepth.ops.norm_kernel import fill_normed

    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if len(x):
        with on_device_of(x):
            fill_normed(x.contiguous(), scale, shift, skip, out, eps=eps, silu=silu)
    return out


def _normed_backward(
    grad: Tensor, x: Tensor, scale: Tensor, shift: Tensor, skip: Tensor | None, eps: float, silu: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of x, scale, shift, a bias added to x, and skip."""
    from logdepth.ops.column_sums import column_sums
    from logdepth.ops.norm_kernel import norm_programs, normed_backward

    width = len(scale)
    x_grad = torch.empty_like(x, memory_format=torch.contiguous_format)
    skip_grad = None if skip is None else torch.empty_like(skip, memory_format=torch.contiguous_format)
    if not len(x):
        zeros = torch.zeros(width, device=x.device)
        return x_grad, zeros, zeros, zeros, skip_grad
    sums = torch.empty(norm_programs(len(x), width), 3 * width, device=x.device)
    normed_backward(grad.contiguous(), x.contiguous(), scale, shift, skip, x_grad, skip_grad, sums, eps=eps, silu=silu)
    scale_grad, shift_grad, bias_grad = torch.split(column_sums(sums), width)
    return x_grad, scale_grad, shift_grad, bias_grad, skip_grad
