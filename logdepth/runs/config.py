"""RunConfig: everything that decides the numbers of a run. Where files lie is not in it."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from logdepth.config import flattened, to_dict
from logdepth.data import DataConfig
from logdepth.errors import UserError
from logdepth.models import ModelConfig, ScanLMConfig

Precision = Literal["auto", "float32", "bfloat16"]


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """AdamW with linear warm-up, then a cosine to a thousandth of the peak; early stopping on validation loss."""

    learning_rate: float = 1e-3
    """Peak."""
    weight_decay: float = 1e-4
    """AdamW's, on matrices and embeddings."""
    betas: tuple[float, ...] = (0.9, 0.999)
    """AdamW's two."""
    warmup_steps: int = 0
    """Steps in which the learning rate rises from zero to its peak."""
    epochs: int = 50
    """Passes over the training split that the cosine spans."""
    max_steps: int | None = None
    """Steps that the cosine spans, instead of epochs."""
    batch_size: int = 32
    """Windows in a step."""
    context: int = 512
    """Tokens in a window."""
    shift_windows: bool = False
    """Whether each epoch cuts the text into windows at a place of its own, rather than all at the same."""
    micro_batch: int | None = None
    """Windows that go through the model at once; a step adds up the gradients of its micro-batches."""
    reset_at_documents: bool = False
    """Whether each document of a window starts anew, as if alone, instead of reading on from the one before."""
    clip: float = 1.0
    """Norm to which gradients are clipped."""
    evaluate_every: int | None = None
    """Steps between validations; by default one epoch."""
    patience: int = 10
    """Validations without a better loss after which training stops."""
    log_every: int = 10
    """Steps between lines of metrics."""
    precision: Precision = "auto"
    """Of the model's arithmetic; auto: bfloat16 autocast on CUDA, float32 elsewhere."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …; auto: a GPU if there is one."""
    threads: int | None = None
    """CPU threads; by default as many as torch chooses. Fewer are faster where others use the cores."""
    init_from: Path | None = None
    """Folder of a run whose best weights to start from; its tokenizer is used too."""
    checkpoint_minutes: float = 10.0
    """Minutes between checkpoints, besides those at validations."""
    compile: bool = False
    """torch.compile: operator and post-embedding net of a ScanLM, the whole of a Transformer."""
    accelerate: bool = False
    """Fused kernels and CUDA graphs; falls back, and says so, where they do not apply."""
    deterministic: bool = True
    """Whether CUDA may only use algorithms that give the same bits each time; exact resuming needs it."""
    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where metrics go besides metrics.jsonl."""

    def __post_init__(self) -> None:
        at_least_one = ("epochs", "batch_size", "context", "patience", "log_every")
        may_be_none = ("max_steps", "micro_batch", "evaluate_every", "threads")
        for name in (*at_least_one, *(name for name in may_be_none if getattr(self, name) is not None)):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1; got {getattr(self, name)}")
        for name in ("learning_rate", "clip", "checkpoint_minutes"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{name} must be above 0 and finite; got {getattr(self, name)}")
        if self.warmup_steps < 0 or not self.weight_decay >= 0:
            raise ValueError("warmup_steps and weight_decay must not be negative")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be two numbers from 0 to below 1; got {self.betas}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run."""

    seed: int = 0
    """Of the initial weights, the order of batches and dropout."""
    data: DataConfig = field(default_factory=DataConfig)
    """Which text, and how it becomes tokens."""
    model: ModelConfig = field(default_factory=ScanLMConfig)
    """The language model."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """How it is trained."""

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be from 0 to below 2^63; got {self.seed}")


OF_THE_MACHINE = {
    "data.paths",
    *(f"train.{name}" for name in ("device", "threads", "trackers", "checkpoint_minutes", "log_every")),
    *(f"train.{name}" for name in ("compile", "accelerate")),
}
"""Fields in which machines that share a study may differ; that they read the same text is checked by its hash."""


def decisive(config: RunConfig) -> dict[str, Any]:
    """Dotted names to values of a config, without what may differ between the machines of a study."""
    return {name: value for name, value in flattened(to_dict(config)).items() if name not in OF_THE_MACHINE}


def device_named(name: str, flag: str = "--train.device") -> torch.device:
    """The device of a config or a flag, or an error that says what is there."""
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


def arithmetic(precision: Precision, device: torch.device) -> torch.autocast:
    """The autocast in which a model of this precision runs."""
    low = precision == "bfloat16" or (precision == "auto" and device.type == "cuda")
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=low)
