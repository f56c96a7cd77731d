"""Range checks that several configs share."""

import dataclasses
import math
from typing import Any

MAX_LAYERS = 1_000
"""Number of layers above which a config is refused. Already building so many modules would take minutes."""


def check_layers(name: str, value: int) -> None:
    """Raise a ValueError unless a number of layers is from 1 to `MAX_LAYERS`."""
    if not 1 <= value <= MAX_LAYERS:
        raise ValueError(f"{name} must be at least 1 and at most {MAX_LAYERS:,}; got {value}")


def check_finite(name: str, value: float) -> None:
    """Raise a ValueError for an infinity and for NaN."""
    if not math.isfinite(value):
        raise ValueError(f"{name} must be finite; got {value}")


def check_dropouts(config: Any) -> None:
    """Raise a ValueError unless all fields whose names end in `dropout` are probabilities below 1."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name.endswith("dropout") and not 0 <= value < 1:
            raise ValueError(f"{field.name} must be from 0 to below 1; got {value}")
