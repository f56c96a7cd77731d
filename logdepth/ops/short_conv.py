"""A causal depthwise convolution over the last few tokens of rows, with SiLU."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from logdepth.ops.dispatch import backward_by_kernels, on_device_of, use_kernels


def short_conv(x: Tensor, before: Tensor | None, weight: Tensor) -> Tensor:
    """SiLU(Σ_j w_j ∘ x_{t−j}), in the dtype of x.

    Args:
        x: `[rows, length, width]`.
        before: what precedes it, `[rows, size − 1, width]`; None: zeros.
        weight: `[size, width]`; the last is of the token itself.
    """
    if use_kernels(x) and use_kernels(weight):
        before = None if before is None else before.to(x.dtype).contiguous()
        found: Tensor = _ShortConv.apply(x, before, weight)  # type: ignore[no-untyped-call]
        return found
    (size, width), length = weight.shape, x.shape[1]
    if before is None:
        before = x.new_zeros(len(x), size - 1, width)
    window = torch.cat([before.to(x.dtype), x], dim=1)
    out = torch.zeros_like(x)
    for tap in range(size):
        out = torch.addcmul(out, window[:, tap : tap + length], weight[tap].to(x.dtype))
    return F.silu(out)


class _ShortConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, before: Tensor | None, weight: Tensor) -> Tensor:
        from logdepth.ops.short_conv_kernel import convolve

        x, weight = x.contiguous(), weight.contiguous()
        ctx.save_for_backward(x, before, weight)
        out = torch.empty_like(x)
        if out.numel():
            with on_device_of(x):
                convolve(x, before, weight, out)
        return out

    @staticmethod
    @backward_by_kernels
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from logdepth.ops.column_sums import column_sums
        from logdepth.ops.short_conv_kernel import convolve_backward, num_sums

        x, before, weight = ctx.saved_tensors
        x_grad, before_grad = torch.empty_like(x), None if before is None else torch.empty_like(before)
        if not x.numel():
            return x_grad, None if before is None else torch.zeros_like(before), torch.zeros_like(weight)
        sums = torch.empty(num_sums(x, weight), weight.numel(), device=x.device, dtype=torch.float32)
        convolve_backward(grad.contiguous(), x, before, weight, x_grad, before_grad, sums)
        return x_grad, before_grad, column_sums(sums).view(weight.shape).to(weight.dtype)
