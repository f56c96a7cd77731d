"""Weights in the dtype of the products, all cast at once."""

from collections.abc import Iterable

import torch
from torch import Tensor

ALIGNMENT = 64
"""Numbers to whose multiples each copy is aligned."""


class Casts:
    """Copies of weights for one pass. They belong to whoever still reads them: another pass makes others."""

    def __init__(self, weights: Iterable[Tensor], dtype: torch.dtype) -> None:
        self.dtype = dtype
        others = [weight.detach() for weight in weights if weight.dtype != dtype]
        self._copies: dict[int, Tensor] = {}
        if not others:
            return
        sizes = [-(-weight.numel() // ALIGNMENT) * ALIGNMENT for weight in others]
        room = torch.split(torch.empty(sum(sizes), dtype=dtype, device=others[0].device), sizes)
        copies = [one[: weight.numel()].view(weight.shape) for one, weight in zip(room, others, strict=True)]
        torch._foreach_copy_(copies, others)
        # By address: a parameter and what is detached from it have one.
        self._copies = {weight.data_ptr(): copy for weight, copy in zip(others, copies, strict=True)}

    def __getitem__(self, weight: Tensor) -> Tensor:
        """The copy of a weight, or itself; cut from the graph."""
        weight = weight.detach()
        return self._copies.get(weight.data_ptr(), weight).to(self.dtype)


def arithmetic_dtype(operand: Tensor) -> torch.dtype:
    """Of matrix products with this operand: autocast's, where it is on."""
    device = operand.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else operand.dtype
