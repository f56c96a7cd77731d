"""Training: one run, from a config to weights. A run that was stopped resumes bit-for-bit."""

from logdepth.training.checkpoint import TrainState
from logdepth.training.interrupt import Interrupted, stop_signals
from logdepth.training.loop import DivergedError, Trainer, batches_of, repeatable
from logdepth.training.muon import Muon
from logdepth.training.next_token_loss import NextTokenLoss
from logdepth.training.start import checked_and_prepared, prepared_for, resume, train, use_threads, with_absolute_paths
from logdepth.training.watch import Watch

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
    "stop_signals",
    "train",
    "use_threads",
    "with_absolute_paths",
]
