"""Training: one run, from a config to weights. A run that was stopped resumes bit-for-bit."""

from logdepth.train.checkpoint import TrainState
from logdepth.train.interrupt import Interrupted
from logdepth.train.loop import DivergedError, Trainer, batches_of, repeatable
from logdepth.train.muon import Muon
from logdepth.train.next_token_loss import NextTokenLoss
from logdepth.train.start import checked_and_prepared, prepared_for, resume, train, use_threads, with_absolute_paths
from logdepth.train.watch import Watch

__all__ = [
    "DivergedError",
    "Interrupted",
    "Muon",
    "NextTokenLoss",
    "TrainState",
    "Trainer",
    "Watch",
    "batches_of",
    "checked_and_prepared",
    "prepared_for",
    "repeatable",
    "resume",
    "train",
    "use_threads",
    "with_absolute_paths",
]
