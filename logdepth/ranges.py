"""Range checks that several configs share."""

import dataclasses
import math
from typing import Any

MAX_LAYERS = 1_000
"""Number of layers above which a config is refused. Already building so many modules would take minutes."""
MAX_THREADS = 1_024
"""Number of CPU threads above which a config is refused. OpenMP ends the process if it cannot start as many."""
MAX_COUNT = 2**40
"""Number of steps, sequences or tokens above which a config is refused: products of two counts fit into 64 bits."""
MAX_DIGITS = 30
"""Number of digits of a number that a message shows in full."""


def check_layers(name: str, value: int) -> None:
    """Raise a ValueError unless a number of layers is from 1 to `MAX_LAYERS`."""
    if not 1 <= value <= MAX_LAYERS:
        raise ValueError(f"{name} must be at least 1 and at most {MAX_LAYERS:,}; got {value}")


def check_counts(config: Any, *names: str, at_least: int = 1) -> None:
    """Raise a ValueError unless these fields are from `at_least` to `MAX_COUNT`, or None."""
    for name in names:
        value = getattr(config, name)
        if value is None:
            continue
        if value < at_least:
            raise ValueError(f"{name} must be at least {at_least}; got {_shown(value)}")
        if value > MAX_COUNT:
            raise ValueError(f"{name} must be at most {MAX_COUNT:,}; got {_shown(value)}")


def check_threads(threads: int | None) -> None:
    """Raise a ValueError unless a number of CPU threads is from 1 to `MAX_THREADS`, or None."""
    if threads is not None and threads < 1:
        raise ValueError(f"threads must be at least 1; got {_shown(threads)}")
    if threads is not None and threads > MAX_THREADS:
        raise ValueError(f"threads must be at most {MAX_THREADS:,}; got {_shown(threads)}")


def _shown(value: int) -> str:
    digits = str(value)
    return digits if len(digits) <= MAX_DIGITS else f"{digits[:10]}… ({len(digits.lstrip('-'))} digits)"


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
