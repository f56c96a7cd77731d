"""The activations that operators may be built with."""

from collections.abc import Callable
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

ActivationName = Literal["relu", "silu", "gelu"]

ACTIVATIONS: dict[ActivationName, Callable[[Tensor], Tensor]] = {"relu": F.relu, "silu": F.silu, "gelu": F.gelu}


def activation_named(name: ActivationName) -> Callable[[Tensor], Tensor]:
    """The function, or an error that lists the names."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation {name!r} is unknown; choose from {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def name_of(activation: Callable[[Tensor], Tensor]) -> ActivationName:
    """The name under which a function is listed."""
    return next(name for name, function in ACTIVATIONS.items() if function is activation)
