"""Runs on disk: configs, folders and weights."""

from logdepth.runs.config import MACHINE_FIELDS, RunConfig, TrainConfig, decisive, device_named
from logdepth.runs.folder import PRETRAINED, LoadedRun, RunFolder, Weights

__all__ = [
    "MACHINE_FIELDS",
    "PRETRAINED",
    "LoadedRun",
    "RunConfig",
    "RunFolder",
    "TrainConfig",
    "Weights",
    "decisive",
    "device_named",
]
