"""The config of one solver's training on one task."""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from logdepth.config import flattened, to_dict
from logdepth.errors import UserError
from logdepth.models.encoder import EncoderConfig
from logdepth.ops.precision import Precision
from logdepth.ranges import check_counts, check_threads
from logdepth.solving.solver import Form, SolverConfig


@dataclass(frozen=True, kw_only=True)
class TaskTrainConfig:
    """Optimizer, batches, curriculum and hardware of a training on a task."""

    optimizer: Literal["adamw", "amsgrad", "muon"] = "adamw"
    """adamw, amsgrad: AdamW, or its variant AMSGrad, for all weights. muon: Muon for hidden matrices, else AdamW."""
    learning_rate: float = 1e-3
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.0
    """Decoupled weight decay of matrices and embeddings."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """AdamW betas (β1, β2)."""
    muon_learning_rate: float | None = None
    """Peak learning rate of Muon; by default, AdamW's."""
    muon_momentum: float = 0.95
    """Momentum of Muon, from 0 to below 1."""
    schedule: Literal["constant", "cosine"] = "constant"
    """What the learning rate does after the warm-up: it stays, or falls along a cosine to a thousandth of its peak."""
    warmup_steps: int = 0
    """Number of steps in which the learning rate rises linearly from zero to its peak."""
    steps: int = 20_000
    """Largest number of steps."""
    batch_size: int = 256
    """Number of sequences per step."""
    batch_tokens: int | None = None
    """Number of tokens per step: short sequences come in larger batches. By default, batch_size decides."""
    clip: float = 1.0
    """Largest norm of the gradient; longer gradients are clipped to it."""
    curriculum: float | None = None
    """Begin with the easiest case of the task, and add the next whenever the accuracy over 20 steps is at least this.
    Cases are also added at equal distances over the first half of the steps, so that every model trains on all of them.
    By default, all cases are there from the start."""
    check_every: int = 500
    """Number of steps between checks of the accuracy beyond the training lengths."""
    stop_at: float | None = 0.9999
    """Stop after two checks in a row with at least this accuracy at every test length that checks cover. Checks have
    examples of their own. They decide when training ends, not which weights are kept. None: always train all steps."""
    precision: Precision = "float32"
    """Precision of the arithmetic; weights are always float32. auto: bfloat16 autocast on CUDA, float32 elsewhere. The
    default is exact, because errors of long state tracking add up, and small models are bound by launches anyway."""
    device: str = "auto"
    """Device to train on: cpu, cuda, cuda:1, and so on. auto: a GPU if there is one."""
    threads: int | None = None
    """Number of CPU threads. By default, PyTorch chooses."""
    checkpoint_minutes: float = 2.0
    """Number of minutes between checkpoints."""
    accelerate: bool = True
    """Use kernels and CUDA graphs on a GPU."""

    def __post_init__(self) -> None:
        check_counts(self, "steps", "batch_size", "batch_tokens", "check_every")
        check_counts(self, "warmup_steps", at_least=0)
        check_threads(self.threads)
        for name in ("learning_rate", "clip", "checkpoint_minutes", "muon_learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be above 0 and finite; got {value}")
        for name in ("curriculum", "stop_at"):
            value = getattr(self, name)
            if value is not None and not 0 < value <= 1:
                raise ValueError(f"{name} must be above 0 and at most 1; got {value}")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay must be at least 0; got {self.weight_decay}")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1; got {self.betas}")
        if not 0 <= self.muon_momentum < 1:
            raise ValueError(f"muon_momentum must be from 0 to below 1; got {self.muon_momentum}")


@dataclass(frozen=True, kw_only=True)
class TaskRunConfig:
    """Everything that decides the numbers of one training on a task."""

    task: str
    """Name of the task."""
    form: Form = "prefixes"
    """Where answers are asked."""
    solver: SolverConfig
    """The model."""
    seed: int = 0
    """Random seed for initial weights, examples and dropout."""
    train: TaskTrainConfig = field(default_factory=TaskTrainConfig)
    """Optimizer, batches, curriculum and hardware."""

    def __post_init__(self) -> None:
        if isinstance(self.solver, EncoderConfig) and self.form != "whole":
            raise ValueError(f"an encoder answers once for each sequence: form must be 'whole'; got '{self.form}'")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be from 0 to below 2^63; got {self.seed}")


MACHINE_FIELDS = {f"train.{name}" for name in ("device", "threads", "checkpoint_minutes", "accelerate")}
"""Fields that may differ between the machines of one study."""


def decisive(config: TaskRunConfig) -> dict[str, Any]:
    """The fields of a config that all machines of a study must agree on: dotted names to values."""
    return {name: value for name, value in flattened(to_dict(config)).items() if name not in MACHINE_FIELDS}


def refuse_change(saved: TaskRunConfig, asked: TaskRunConfig, where: str) -> None:
    """Raise a UserError that names the first field in which two configs of the same run differ."""
    before, after = decisive(saved), decisive(asked)
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            raise UserError(
                f"{where} was made with {name} {before.get(name)!r}, not {after.get(name)!r}; choose another --out, "
                "or use the same settings"
            )
