"""Training: one run, from a config to weights, resumable to the bit."""

from logdepth.train.interrupt import Interrupted
from logdepth.train.loop import Standing, Trainer, compile_model
from logdepth.train.start import prepared_for, resume, train

__all__ = ["Interrupted", "Standing", "Trainer", "compile_model", "prepared_for", "resume", "train"]
