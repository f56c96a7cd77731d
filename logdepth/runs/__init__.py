"""Runs on disk: configs, folders, weights."""

from logdepth.runs.config import Precision, RunConfig, TrainConfig, arithmetic, device_named
from logdepth.runs.folder import LoadedRun, RunFolder, Weights

__all__ = [
    "LoadedRun",
    "Precision",
    "RunConfig",
    "RunFolder",
    "TrainConfig",
    "Weights",
    "arithmetic",
    "device_named",
]
