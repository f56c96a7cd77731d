"""Solvers: models that answer the questions of a task, and the models that studies of tasks compare."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from logdepth.errors import UserError, did_you_mean
from logdepth.models import LMConfig
from logdepth.models.encoder import EncoderConfig
from logdepth.operators import GRCConfig, MLPLDRUConfig
from logdepth.ops import linear
from logdepth.ops.cross_entropy import IGNORED
from logdepth.tasks import Examples, Task, last_only

PIECE_TOKENS = 2**17
"""Tokens that a test reads at the same time, at most; longer sequences are read in pieces, from state to state."""

SolverConfig = EncoderConfig | LMConfig
Form = Literal["whole", "prefixes"]
"""whole: one answer for each sequence, at its end. prefixes: an answer wherever the task asks for one."""


class Questions(NamedTuple):
    """A batch of examples as tensors: what is read, where answers are asked, and the right ones."""

    tokens: Tensor
    """`[batch, length]`."""
    places: Tensor | None
    """`[asked]`: positions of the flattened tokens at which an answer is asked; None: at all of them."""
    targets: Tensor
    """`[asked]`: the right answers; -100 at positions that do not count."""

    @classmethod
    def of(cls, examples: Examples, form: Form, device: torch.device) -> "Questions":
        tokens, targets, mask = last_only(examples) if form == "whole" else examples
        counts = mask.sum(axis=1)
        places = None
        if not mask.all():
            if (counts == counts[0]).all():  # the shape depends on the case only, so that a CUDA graph fits all batches
                places = np.flatnonzero(mask)
                targets = targets[mask]
            else:
                targets = np.where(mask, targets, IGNORED)
        return cls(
            _on(tokens, device), None if places is None else _on(places, device), _on(targets.reshape(-1), device)
        )


def _on(array: "np.typing.NDArray[np.int64]", device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor


class Solver(nn.Module, ABC):
    """A model that answers at every asked position."""

    @abstractmethod
    def forward(self, tokens: Tensor, places: Tensor | None) -> Tensor:
        """The logits of all answers, `[asked, classes]`."""

    @abstractmethod
    def answers(self, tokens: Tensor, places: Tensor | None) -> Tensor:
        """The most likely answers, `[asked]`, for sequences of any length, without gradients."""


class PrefixSolver(Solver):
    """A language model that answers after every prefix. Classes are the first entries of its vocabulary."""

    def __init__(self, task: Task, config: LMConfig) -> None:
        super().__init__()
        self.num_classes = task.num_classes
        self.model = config.build(max(task.num_symbols, task.num_classes))

    def forward(self, tokens: Tensor, places: Tensor | None) -> Tensor:
        features = self.model.features(tokens).flatten(0, 1)
        if places is not None:
            features = features.index_select(0, places)
        return linear(features, self.model.head_weight[: self.num_classes])

    @torch.no_grad()
    def answers(self, tokens: Tensor, places: Tensor | None) -> Tensor:
        is_asked = torch.ones_like(tokens, dtype=torch.bool)
        if places is not None:
            is_asked = torch.zeros_like(is_asked).view(-1).index_fill_(0, places, True).view(tokens.shape)
        found, state, start = torch.zeros_like(tokens), self.model.init_state(len(tokens)), 0
        for piece in torch.split(tokens, max(1, PIECE_TOKENS // len(tokens)), dim=1):
            features, state = self.model.continued(piece, state)
            here = slice(start, start := start + piece.shape[1])
            logits = linear(features[is_asked[:, here]], self.model.head_weight[: self.num_classes])
            found[:, here][is_asked[:, here]] = logits.argmax(-1)
        return found[is_asked]


class WholeSolver(Solver):
    """An encoder that reads a whole sequence and answers once, at its end."""

    def __init__(self, task: Task, config: EncoderConfig) -> None:
        super().__init__()
        self.encoder = config.build(task.num_symbols, task.num_classes)

    def forward(self, tokens: Tensor, places: Tensor | None) -> Tensor:
        if (tokens.numel() if places is None else len(places)) != len(tokens):
            raise ValueError("an encoder answers once for each sequence; ask at the last position only")
        logits: Tensor = self.encoder(tokens)
        return logits

    @torch.no_grad()
    def answers(self, tokens: Tensor, places: Tensor | None) -> Tensor:
        logits: Tensor = self(tokens, places)
        return logits.argmax(-1)


def build_solver(task: Task, config: SolverConfig) -> Solver:
    """A new solver of a task."""
    return WholeSolver(task, config) if isinstance(config, EncoderConfig) else PrefixSolver(task, config)


@dataclass(frozen=True, kw_only=True)
class SolverKind:
    """A model that studies of tasks compare, at any width."""

    title: str
    """As tables print it."""
    config: Callable[[int], SolverConfig]
    """The config at a width."""

    @property
    def is_encoder(self) -> bool:
        """Whether it reads whole sequences only."""
        return isinstance(self.config(64), EncoderConfig)


def _layers(*blocks: str, repeats: int) -> Callable[[int], LMConfig]:
    """A language model with an output head of its own."""
    return lambda width: LMConfig(dim=width, blocks=blocks, repeats=repeats, tied=False)


MEMORY = "memory:heads=2,chunk=16"
TWICE = "write-strength=2.0"
ROPE = "attention:heads=4,qk_norm=true,backend=sdpa"  # not FlexAttention, whose compilation takes minutes
ALIBI, WINDOW = f"{ROPE},positions=alibi", f"{ROPE},window=64"
SCAN = "scan:conv=0,gate=false"
NOISY_SCAN = f"{SCAN},merge_dropout=0.1"
"""Noise in every merge keeps states apart, so that errors do not grow with the number of merges."""

SOLVERS: dict[str, SolverKind] = {
    "encoder-mlp-ldru": SolverKind(
        title="encoder, MLP-LDRU", config=lambda width: EncoderConfig(operator=MLPLDRUConfig.original(width=width))
    ),
    "encoder-grc": SolverKind(
        title="encoder, GRC", config=lambda width: EncoderConfig(operator=GRCConfig(width=width))
    ),
    "grc": SolverKind(title="GRC scan", config=_layers(SCAN, repeats=1)),
    "grc-dropout": SolverKind(title="GRC scan, dropout 0.1 in ⊙", config=_layers(NOISY_SCAN, repeats=1)),
    "memory": SolverKind(title="memory tree, β ≤ 1", config=_layers(MEMORY, "mlp", repeats=2)),
    "memory-twice": SolverKind(title="memory tree, β ≤ 2", config=_layers(f"{MEMORY},{TWICE}", "mlp", repeats=2)),
    "delta": SolverKind(
        title="delta memory, folded, β ≤ 1", config=_layers(f"{MEMORY},reading=fold", "mlp", repeats=2)
    ),
    "delta-twice": SolverKind(
        title="delta memory, folded, β ≤ 2", config=_layers(f"{MEMORY},reading=fold,{TWICE}", "mlp", repeats=2)
    ),
    "grc-memory": SolverKind(title="GRC scan and memory tree", config=_layers(NOISY_SCAN, MEMORY, "mlp", repeats=2)),
    "memory-window": SolverKind(
        title="memory tree and window 64", config=_layers(MEMORY, "mlp", WINDOW, "mlp", repeats=1)
    ),
    "window": SolverKind(title="Transformer, window 64", config=_layers(WINDOW, "mlp", repeats=2)),
    "rope": SolverKind(title="Transformer, RoPE", config=_layers(ROPE, "mlp", repeats=2)),
    "alibi": SolverKind(title="Transformer, ALiBi", config=_layers(ALIBI, "mlp", repeats=2)),
}
"""Maps names to models. The encoders are those of the LDRU paper; all others are language models. delta is Gated
DeltaNet's memory, with β ≤ 2 it has negative eigenvalues."""


def solver_kind(name: str) -> SolverKind:
    """The model of this name; a UserError with a hint if there is none."""
    if name not in SOLVERS:
        raise UserError(f"there is no model '{name}' for tasks{did_you_mean(name, SOLVERS)}")
    return SOLVERS[name]
