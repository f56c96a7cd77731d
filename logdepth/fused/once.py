"""Backward passes by kernels: there are no derivatives of them, and they choose their dtypes themselves."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def by_kernels(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses to be part of a graph. torch's once_differentiable says so only where a second backward pass comes by:
    one that is asked for the gradients of some tensors may not, and returns wrong ones. And is never autocast."""

    @functools.wraps(backward)
    def alone(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fused kernels do not support create_graph=True: second derivatives would be lost; use a model that is "
                "not accelerated"
            )
        device = next(one.device.type for one in grads if one is not None)
        with torch.autocast(device, enabled=False):
            return backward(ctx, *grads)

    return alone
