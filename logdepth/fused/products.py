"""Matrix products and what follows them, by whichever kernels are fastest for as many rows."""

from typing import Any

import torch
from torch import Tensor

from logdepth.fused.cell import Operands
from logdepth.kernels import few_rows
from logdepth.kernels.activation import activate, activate_backward
from logdepth.kernels.linear import fits, linear_activated


def readable(operands: Operands, weight: Tensor) -> Tensor | None:
    """Pairs of operands as `linear_and_activation` takes them without a copy, where nothing else is kept; or None."""
    pairs = operands.as_they_lie()
    return pairs if pairs is not None and fits(pairs, weight) else operands.side_by_side()


def linear_and_activation(
    x: Tensor, weight: Tensor, bias: Tensor, before: Tensor, hidden: Tensor, **activation: Any
) -> None:
    """before = x · weightᵀ + bias, hidden = dropout(act(before)); where both are one tensor, it is left as `hidden`."""
    if hidden is before and fits(x, weight):
        linear_activated(x, weight, bias, hidden, **activation)
    elif hidden is before and few_rows.fits(x) and not activation["rate"]:
        # Of a small level it is the number of kernels that takes time.
        few_rows.linear([x], weight, bias, hidden, activation=activation["activation"])
    else:
        torch.addmm(bias, x, weight.t(), out=before)
        activate(before, hidden, **activation)


def linear_and_slope(
    grad: Tensor, weight: Tensor, before: Tensor, hidden: Tensor, sums: Tensor, **activation: Any
) -> None:
    """From gradients of what `weight` made of `hidden`: `before` becomes its own, and `hidden` is made again."""
    torch.mm(grad, weight, out=hidden)
    activate_backward(before, hidden, sums, **activation)
