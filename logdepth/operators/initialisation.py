"""Weight initialisations of the papers' JAX code, reproduced for torch."""

import math

from torch import Tensor, nn

TRUNCATION_DEVIATION = 0.87962566103423978
"""Standard deviation of a unit normal truncated at ±2; JAX divides by it so that the samples have the one asked for."""


def variance_scaling_(weight: Tensor, scale: float = 1.0) -> Tensor:
    """Fill a `[fan_out, fan_in]` weight as JAX's VarianceScaling(scale, "fan_avg", "truncated_normal") does."""
    fan_out, fan_in = weight.shape
    deviation = math.sqrt(scale / ((fan_in + fan_out) / 2)) / TRUNCATION_DEVIATION
    return nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)


def scaled_linear(in_width: int, out_width: int, scale: float = 1.0) -> nn.Linear:
    """A linear layer with variance-scaled weights and zero bias."""
    if min(in_width, out_width) < 1:
        raise ValueError(f"widths must be at least 1; got a layer from {in_width} to {out_width}")
    linear = nn.Linear(in_width, out_width)
    variance_scaling_(linear.weight.data, scale)
    nn.init.zeros_(linear.bias)
    return linear


def identity_linear(width: int) -> nn.Linear:
    """A square linear layer that starts as the identity map."""
    linear = nn.Linear(width, width)
    nn.init.eye_(linear.weight)
    nn.init.zeros_(linear.bias)
    return linear
