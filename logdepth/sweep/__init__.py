"""Hyperparameter sweeps with Optuna, run by one worker or by several in parallel."""

from logdepth.sweep.space import Choices, Range, Space, changes, default_specs, parse_space
from logdepth.sweep.storage import without_password
from logdepth.sweep.study import Search
from logdepth.sweep.worker import work

__all__ = [
    "Choices",
    "Range",
    "Search",
    "Space",
    "changes",
    "default_specs",
    "parse_space",
    "without_password",
    "work",
]
