"""The config of a run, and what follows from it for devices and precision."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from logdepth.config import flattened, to_dict
from logdepth.data import DataConfig
from logdepth.errors import UserError
from logdepth.models import ModelConfig, ScanLMConfig
from logdepth.ops.precision import Precision
from logdepth.ranges import check_counts, check_threads

PARALLEL = re.compile(r"(?P<kind>replicate|shard)(:[1-9][0-9]{0,5})?")
"""A way in which ranks share a run, with the number of ranks that do."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Optimizer, learning-rate schedule, batches and hardware of a run; early stopping is on validation loss."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    """adamw: AdamW for all weights. muon: Muon for hidden matrices, AdamW for embedding, output head and vectors."""
    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""
    weight_decay: float = 1e-4
    """Decoupled weight decay of matrices and embeddings: per step, a share of learning rate × weight decay."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """AdamW betas (β1, β2)."""
    muon_learning_rate: float | None = None
    """Peak learning rate of Muon, on AdamW's scale: an update has an RMS of about 0.2 × rate. By default, AdamW's."""
    muon_momentum: float = 0.95
    """Momentum of Muon, from 0 to below 1."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """How the learning rate falls to a thousandth of its peak. cosine: after the warm-up. wsd: linearly, at the end."""
    decay_fraction: float = 0.2
    """Share of all steps over which wsd decays, above 0 and at most 1. Ignored with cosine."""
    warmup_steps: int = 0
    """Number of steps in which the learning rate rises linearly from zero to its peak."""
    epochs: int = 50
    """Length of training and of the schedule, in passes over the training split."""
    max_steps: int | None = None
    """Length of training and of the schedule, in steps. By default, epochs decide."""
    batch_size: int = 32
    """Number of windows per step."""
    context: int = 512
    """Training length: number of tokens per window."""
    shift_windows: bool = False
    """Cut the text into windows at a random offset in each epoch. By default, all epochs cut it at the same places."""
    micro_batch: int | None = None
    """Number of windows per forward and backward pass; a step adds up the gradients. By default, all at once."""
    reset_at_documents: bool = False
    """Process each document of a window separately. By default, the model reads on from one document to the next."""
    clip: float = 1.0
    """Largest norm of the gradient; longer gradients are clipped to it."""
    evaluate_every: int | None = None
    """Number of steps between validations. By default, one epoch."""
    patience: int = 10
    """Number of validations in a row without a lower loss after which training stops early."""
    log_every: int = 10
    """Number of steps between lines of metrics."""
    precision: Precision = "auto"
    """Precision of the arithmetic; weights are always float32. auto: bfloat16 autocast on CUDA, float32 elsewhere."""
    device: str = "auto"
    """Device to train on: cpu, cuda, cuda:1, and so on. auto: a GPU if there is one."""
    threads: int | None = None
    """Number of CPU threads. By default, PyTorch chooses; choose fewer where other programs use the cores."""
    parallel: tuple[str, ...] = ()
    """How the ranks of torchrun share a run: replicate, shard, or both: replicate:2 shard. By default, replicate."""
    init_from: Path | None = None
    """Folder of a run whose best weights and tokenizer to start from. By default, weights are random."""
    checkpoint_minutes: float = 10.0
    """Number of minutes between checkpoints, in addition to those at validations."""
    compile: bool = False
    """Use torch.compile: for the operators and nets of a model with scans, for the whole of another."""
    accelerate: bool = True
    """Use kernels and CUDA graphs on a GPU. Where they do not apply, a message says so."""
    deterministic: bool = True
    """Restrict CUDA to deterministic algorithms. Without them, a run does not resume bit-for-bit."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Trackers that receive the metrics in addition to metrics.jsonl."""

    def __post_init__(self) -> None:
        check_counts(self, "epochs", "batch_size", "context", "patience", "log_every")
        check_counts(self, "max_steps", "micro_batch", "evaluate_every")
        check_counts(self, "warmup_steps", at_least=0)
        check_threads(self.threads)
        for name in ("learning_rate", "clip", "checkpoint_minutes", "muon_learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be above 0 and finite; got {value}")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay must be at least 0; got {self.weight_decay}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1; got {self.betas}")
        if not 0 <= self.muon_momentum < 1:
            raise ValueError(f"muon_momentum must be from 0 to below 1; got {self.muon_momentum}")
        kinds = [found["kind"] for word in self.parallel if (found := PARALLEL.fullmatch(word))]
        if len(kinds) < len(self.parallel) or len(set(kinds)) < len(kinds):
            raise ValueError(
                f"parallel must be words such as replicate, shard or replicate:2 shard:4; got {' '.join(self.parallel)}"
            )
        if len(kinds) > 1 and sum(":" not in word for word in self.parallel) > 1:
            raise ValueError(f"parallel: only one word may be without a number; got {' '.join(self.parallel)}")
        if not 0 < self.decay_fraction <= 1:
            raise ValueError(f"decay_fraction must be above 0 and at most 1; got {self.decay_fraction}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything that decides the numbers of one training run. Where its files lie is not part of it."""

    seed: int = 0
    """Random seed for initial weights, batch order and dropout."""
    data: DataConfig = field(default_factory=DataConfig)
    """Corpus and tokenizer."""
    model: ModelConfig = field(default_factory=ScanLMConfig)
    """Architecture and size of the language model."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Optimizer, schedule, batches and hardware."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be from 0 to below 2^63; got {self.seed}")


MACHINE_FIELDS = {
    "data.paths",
    *(f"train.{name}" for name in ("device", "threads", "trackers", "checkpoint_minutes", "log_every")),
    *(f"train.{name}" for name in ("compile", "accelerate", "parallel")),
}
"""Fields that may differ between the machines of one study. A hash checks that they read the same text."""


def decisive(config: RunConfig) -> dict[str, Any]:
    """The fields of a config that all machines of a study must agree on: dotted names to values."""
    return {name: value for name, value in flattened(to_dict(config)).items() if name not in MACHINE_FIELDS}


def device_named(name: str, flag: str = "--train.device") -> torch.device:
    """The device with this name; an error that names the flag where it cannot be used."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise RuntimeError("only cpu and cuda are supported")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"device '{name}' cannot be used here ({reason}); try {flag} cpu") from None
    return device
