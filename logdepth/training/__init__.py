"""Training: one run, from a config to weights. A run that was stopped resumes bit-for-bit."""

from logdepth.training.checkpoint import TrainState
from logdepth.training.interrupt import Interrupted, StopRequest, stop_signals
from logdepth.training.loop import DivergedError, Trainer, batches_of, repeatable, seed_of_step
from logdepth.training.muon import Muon
from logdepth.training.next_token_loss import NextTokenLoss
from logdepth.training.optimizer import ModelOptimizer, OptimizerConfig
from logdepth.training.start import checked_and_prepared, prepared_for, resume, train, use_threads, with_absolute_paths
from logdepth.training.watch import Watch

__all__ = [
    "DivergedError",
    "Interrupted",
    "ModelOptimizer",
    "Muon",
    "NextTokenLoss",
    "OptimizerConfig",
    "StopRequest",
    "TrainState",
    "Trainer",
    "Watch",
    "batches_of",
    "checked_and_prepared",
    "prepared_for",
    "repeatable",
    "resume",
    "seed_of_step",
    "stop_signals",
    "train",
    "use_threads",
    "with_absolute_paths",
]
