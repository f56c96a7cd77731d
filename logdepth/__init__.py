"""Log-depth recurrent language models: a learnable, non-associative operator swept over a balanced binary tree."""

import importlib
from typing import TYPE_CHECKING, Any

from logdepth.blocks.scan import ScanLayer
from logdepth.models import LM
from logdepth.scanning import ScanResult, ScanState, reduce, scan
from logdepth.version import __version__

if TYPE_CHECKING:
    from logdepth.recipes import recipe
    from logdepth.trained import TrainedModel, load, train

_PROGRAMS = {
    "TrainedModel": "logdepth.trained",
    "load": "logdepth.trained",
    "recipe": "logdepth.recipes",
    "train": "logdepth.trained",
}
"""Names that need more than torch and numpy; they are imported when they are first used."""

__all__ = [
    "LM",
    "ScanLayer",
    "ScanResult",
    "ScanState",
    "TrainedModel",
    "__version__",
    "load",
    "recipe",
    "reduce",
    "scan",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _PROGRAMS:
        raise AttributeError(f"module 'logdepth' has no attribute '{name}'")
    return getattr(importlib.import_module(_PROGRAMS[name]), name)
