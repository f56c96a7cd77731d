"""Dropout as kernels see it: a seed on the device, and the rate at which a module drops."""

import torch
from torch import Tensor, nn


def draw_seed(device: torch.device) -> Tensor:
    """A seed for all dropout in one call of an op.

    It is drawn by torch's generator and stays on the device, so a replayed CUDA graph drops other elements each time,
    and the same ones again after the same `torch.manual_seed`.
    """
    return torch.randint(2**31, (1,), device=device, dtype=torch.int64)


def rate_of(dropout: nn.Dropout) -> float:
    """The probability with which the module drops an element now: 0 outside training."""
    return dropout.p if dropout.training else 0.0


def drops(module: nn.Module) -> bool:
    """Whether any dropout inside the module is active."""
    return any(rate_of(part) > 0 for part in module.modules() if isinstance(part, nn.Dropout))
