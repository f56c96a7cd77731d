"""Backward passes by kernels, of which there are no derivatives."""

import functools
from collections.abc import Callable
from typing import Any

import torch


def refusing_second_derivatives(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Refuses to be part of a graph. torch's once_differentiable says so only where a second backward pass comes by:
    one that is asked for the gradients of some tensors may not, and returns wrong ones."""

    @functools.wraps(backward)
    def refusing(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "fused kernels do not support create_graph=True: second derivatives would be lost; use a model that is "
                "not accelerated"
            )
        return backward(ctx, *grads)

    return refusing
