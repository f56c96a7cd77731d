"""The weights of a GRC and of the net after its merges, as tensors in a fixed order; and sums for their gradients."""

from typing import NamedTuple

import torch
from torch import Tensor

from logdepth.kernels.activation import Activation
from logdepth.operators import GRC, PostMerge


class Cell(NamedTuple):
    """Weights of a GRC, matrices as `[out, in]`. Products read the first four."""

    hidden: Tensor
    hidden_bias: Tensor
    gates: Tensor
    gates_bias: Tensor
    scale: Tensor
    shift: Tensor

    @classmethod
    def of(cls, grc: GRC) -> "Cell":
        linear, gates, norm = grc.hidden, grc.gates, grc.norm
        return cls(linear.weight, linear.bias, gates.weight, gates.bias, norm.weight, norm.bias)


class Net(NamedTuple):
    """Weights of a post-merge net, likewise."""

    hidden: Tensor
    hidden_bias: Tensor
    out: Tensor
    out_bias: Tensor
    scale: Tensor
    shift: Tensor

    @classmethod
    def of(cls, post: PostMerge) -> "Net":
        linear, out, norm = post.hidden, post.out, post.norm
        return cls(linear.weight, linear.bias, out.weight, out.bias, norm.weight, norm.bias)


class Settings(NamedTuple):
    """What a scan does, beside its weights."""

    activation: Activation
    eps: float
    dropout: float
    """Of pairs and hidden layers."""
    net_activation: Activation
    net_eps: float
    net_dropout: float
    net_on_folds: bool
    """Whether the net follows the merges of the down-sweep too."""
    dtype: torch.dtype
    """Of states and matrix products."""
    recompute: bool
    """Whether the backward pass computes again what else would be kept for it."""


def matrix_grad(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    """leftᵀ · right in float32, added to `total` where there is one."""
    left = left.t()
    if left.is_cuda and left.dtype != torch.float32:
        if total is None:
            return torch.mm(left, right, out_dtype=torch.float32)
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    product = (left @ right).float()
    return product if total is None else total.add_(product)


def add_product(totals: dict[str, Tensor], name: str, left: Tensor, right: Tensor) -> None:
    """Adds to the gradient of that name."""
    totals[name] = matrix_grad(left, right, totals.get(name))
