"""Training: one run, from a config to weights, resumable to the bit."""

from logdepth.train.faster import compile_model, make_faster
from logdepth.train.interrupt import Interrupted
from logdepth.train.loop import DivergedError, Standing, Trainer, batches_of, repeatable
from logdepth.train.start import checked_and_prepared, prepared_for, resume, train, use_threads, with_whole_paths
from logdepth.train.watch import Watch

__all__ = [
    "DivergedError",
    "Interrupted",
    "Standing",
    "Trainer",
    "Watch",
    "batches_of",
    "checked_and_prepared",
    "compile_model",
    "make_faster",
    "prepared_for",
    "repeatable",
    "resume",
    "train",
    "use_threads",
    "with_whole_paths",
]
