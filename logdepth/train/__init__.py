"""Training: one run, from a config to weights, resumable to the bit."""

from logdepth.train.interrupt import Interrupted
from logdepth.train.loop import DivergedError, Standing, Trainer, compile_model
from logdepth.train.start import prepared_for, resume, train
from logdepth.train.watch import Watch

__all__ = [
    "DivergedError",
    "Interrupted",
    "Standing",
    "Trainer",
    "Watch",
    "compile_model",
    "prepared_for",
    "resume",
    "train",
]
