"""Runs on disk: configs, folders and weights."""

from logdepth.runs.config import MACHINE_FIELDS, Precision, RunConfig, TrainConfig, arithmetic, decisive, device_named
from logdepth.runs.folder import LoadedRun, RunFolder, Weights

__all__ = [
    "MACHINE_FIELDS",
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
