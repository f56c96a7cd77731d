"""Checks that several configs share."""

import dataclasses
from typing import Any


def check_dropouts(config: Any) -> None:
    """Every field whose name ends in `dropout` must be a probability below 1."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name.endswith("dropout") and not 0 <= value < 1:
            raise ValueError(f"{field.name} must be from 0 to below 1; got {value}")
