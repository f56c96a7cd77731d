"""Runs on disk: configs, folders, weights."""

from logdepth.runs.config import OF_THE_MACHINE, Precision, RunConfig, TrainConfig, arithmetic, decisive, device_named
from logdepth.runs.folder import LoadedRun, RunFolder, Weights

__all__ = [
    "OF_THE_MACHINE",
    "LoadedRun",
    "Precision",
    "RunConfig",
    "RunFolder",
    "TrainConfig",
    "Weights",
    "arithmetic",
    "decisive",
    "device_named",
]
