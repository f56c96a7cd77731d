"""Log-depth recurrent language models: a learnable, non-associative operator swept over a balanced binary tree."""

import importlib
from typing import TYPE_CHECKING, Any

from logdepth.version import __version__

if TYPE_CHECKING:
    from logdepth.blocks.memory import MemoryLayer
    from logdepth.blocks.scan import ScanLayer
    from logdepth.decoding.exported_step import export_step
    from logdepth.models import LM
    from logdepth.recipes import recipe
    from logdepth.runs import PRETRAINED
    from logdepth.scanning import ScanResult, ScanState, Tree, TreeState, build_tree, reduce, scan
    from logdepth.trained import TrainedModel, load, train

_MODULES = {
    "LM": "logdepth.models",
    "PRETRAINED": "logdepth.runs",
    "MemoryLayer": "logdepth.blocks.memory",
    "ScanLayer": "logdepth.blocks.scan",
    "ScanResult": "logdepth.scanning",
    "ScanState": "logdepth.scanning",
    "Tree": "logdepth.scanning",
    "TreeState": "logdepth.scanning",
    "TrainedModel": "logdepth.trained",
    "build_tree": "logdepth.scanning",
    "export_step": "logdepth.decoding.exported_step",
    "load": "logdepth.trained",
    "recipe": "logdepth.recipes",
    "reduce": "logdepth.scanning",
    "scan": "logdepth.scanning",
    "train": "logdepth.trained",
}
"""Where each public name is defined. It is imported when it is first used, so that the command line starts at once,
and so that the scan needs only torch and numpy."""

__all__ = [
    "LM",
    "PRETRAINED",
    "MemoryLayer",
    "ScanLayer",
    "ScanResult",
    "ScanState",
    "TrainedModel",
    "Tree",
    "TreeState",
    "__version__",
    "build_tree",
    "export_step",
    "load",
    "recipe",
    "reduce",
    "scan",
    "train",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'logdepth' has no attribute '{name}'")
    return getattr(importlib.import_module(_MODULES[name]), name)
