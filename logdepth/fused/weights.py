"""The weights of operators and of the net after merges, as tensors in a fixed order; and sums for their gradients."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from logdepth.operators import GRC, MLPLDRU, PostMerge


class GRCWeights(NamedTuple):
    """Matrices as `[out, in]`. Matrix products read all but the last two."""

    hidden: Tensor
    hidden_bias: Tensor
    gates: Tensor
    gates_bias: Tensor
    scale: Tensor
    shift: Tensor

    @classmethod
    def of(cls, grc: GRC) -> "GRCWeights":
        linear, gates, norm = grc.hidden, grc.gates, grc.norm
        return cls(linear.weight, linear.bias, gates.weight, gates.bias, norm.weight, norm.bias)


class MLPLDRUWeights(NamedTuple):
    """Likewise."""

    first: Tensor
    first_bias: Tensor
    second: Tensor
    second_bias: Tensor
    raw: Tensor
    raw_bias: Tensor
    left: Tensor
    left_bias: Tensor
    right: Tensor
    right_bias: Tensor
    out: Tensor
    out_bias: Tensor
    scale: Tensor
    shift: Tensor

    @classmethod
    def of(cls, ldru: MLPLDRU) -> "MLPLDRUWeights":
        linears = (ldru.first, ldru.second, ldru.weights, ldru.left_value, ldru.right_value, ldru.out)
        assert isinstance(ldru.norm, nn.LayerNorm)
        modules = (*linears, ldru.norm)
        return cls(*(one for module in modules for one in (module.weight, module.bias)))


class NetWeights(NamedTuple):
    """Of a post-merge net, likewise."""

    hidden: Tensor
    hidden_bias: Tensor
    out: Tensor
    out_bias: Tensor
    scale: Tensor
    shift: Tensor

    @classmethod
    def of(cls, post: PostMerge) -> "NetWeights":
        linear, out, norm = post.hidden, post.out, post.norm
        return cls(linear.weight, linear.bias, out.weight, out.bias, norm.weight, norm.bias)


def matrix_grad(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    """leftᵀ · right in float32, added to `total` where there is one; without, also for a batch of them."""
    left = left.mT
    if left.is_cuda and left.dtype != torch.float32:
        if total is None:
            product = torch.bmm if left.ndim == 3 else torch.mm
            return product(left, right, out_dtype=torch.float32)
        return torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    found = (left @ right).float()
    return found if total is None else total.add_(found)


class Totals:
    """Gradients by name, added up in float32."""

    def __init__(self) -> None:
        self._totals: dict[str, Tensor] = {}

    def get(self, name: str) -> Tensor | None:
        """None where nothing was added."""
        return self._totals.get(name)

    def add_product(self, name: str, left: Tensor, right: Tensor) -> None:
        """Adds leftᵀ · right."""
        self._totals[name] = matrix_grad(left, right, self.get(name))
