"""Range checks that several configs share."""

import dataclasses
from typing import Any


def check_dropouts(config: Any) -> None:
    """Raise a ValueError unless all fields whose names end in `dropout` are probabilities below 1."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name.endswith("dropout") and not 0 <= value < 1:
            raise ValueError(f"{field.name} must be from 0 to below 1; got {value}")
