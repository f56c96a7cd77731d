"""What every language model has: `forward`, `init_state`, `step`, and a config that exists at any size."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logdepth.scanning import LengthsLike
from logdepth.shapes import Tokens


@dataclass(frozen=True, kw_only=True)
class Size:
    """The size of the models that are compared: one column of the paper's tables."""

    embed_width: int
    """Width E of the embedding of a scan model."""
    state_width: int
    """Width D of a recurrent state."""
    nets: bool = True
    """Whether a scan model has its post-embedding and post-merge nets."""
    dropout: float = 0.0
    """Dropout of a scan model, wherever the paper's has it."""
    layer_width: int
    """Width of a stack of layers: a Transformer, or another baseline."""
    num_layers: int
    num_heads: int
    layers_tied: bool = True
    """Whether the head of such a stack is its embedding."""
    layer_dropout: float = 0.0


class ModelConfig(Protocol):
    """The config of a model; frozen, keyword-only, strict about its values."""

    def build(self, vocab_size: int) -> "LanguageModel": ...

    @classmethod
    def rows(cls, size: Size) -> "Mapping[str, ModelConfig]":
        """The rows of a table that are this kind of model at a size: each becomes a recipe, under its name."""
        ...


class ModelState(Protocol):
    """The state of a batch of sequences. It is never changed in place, so it can be continued twice."""

    @property
    def lengths(self) -> Tensor:
        """Tokens absorbed so far by each row: int64, on the CPU."""
        ...

    @property
    def nbytes(self) -> int: ...

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """The given rows, in the given order; a row may be repeated or left out."""
        ...

    @classmethod
    def concatenate(cls, states: Sequence[Self]) -> Self:
        """One state with the rows of all `states`, at least one, in order."""
        ...

    def detach(self) -> Self: ...


class LanguageModel(nn.Module, ABC):
    """A causal model of tokens. Token by token it gives the same logits as for the whole sequence."""

    vocab_size: int

    @abstractmethod
    def forward(
        self, tokens: Tokens, *, lengths: LengthsLike | None = None, cu_seqlens: LengthsLike | None = None
    ) -> Tensor:
        """Logits of the next token at every position: `[batch, length, vocab]`, or packed `[total, vocab]`.

        Args:
            tokens: `[batch, length]`, or with `cu_seqlens` packed documents `[total]`.
            lengths: valid tokens of each row of a batch padded on the right; logits beyond them mean nothing.
            cu_seqlens: where each packed document starts, and last the total.
        """

    @abstractmethod
    def init_state(self, batch: int) -> Any:
        """The state of `batch` rows that have absorbed nothing."""

    @abstractmethod
    def step(self, tokens: Tokens, state: Any, *, lengths: LengthsLike | None = None) -> tuple[Tensor, Any]:
        """Absorbs any number of further tokens `[batch, length]`; returns their logits and the state after them."""

    def loss(self, tokens: Tokens, targets: Tokens, *, cu_seqlens: LengthsLike | None = None) -> Tensor:
        """Mean cross-entropy of the next tokens, in nats. A model whose head is one matrix need not make all logits."""
        logits = self(tokens, cu_seqlens=cu_seqlens)
        return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())

    def token_losses(
        self, tokens: Tokens, targets: Tokens, state: Any = None, *, cu_seqlens: LengthsLike | None = None
    ) -> tuple[Tensor, Any]:
        """The cross-entropy of each next token, without gradients, and the state after them if one came in."""
        if state is None:
            logits, after = self(tokens, cu_seqlens=cu_seqlens), None
        else:
            logits, after = self.step(tokens, state)
        losses = F.cross_entropy(logits.float().flatten(0, -2), targets.flatten(), reduction="none")
        return losses.view(targets.shape), after

    def frozen_weights(self) -> AbstractContextManager[None]:
        """A scope in which the weights do not change, so what depends on them alone is computed once.

        A CUDA graph that is captured inside the scope keeps the weights that it was captured with.
        """
        return nullcontext()

    def allocate(self, device: torch.device | str) -> None:
        """Allocates what is on the meta device, without values, and moves to the device what has been loaded."""

        def allocated(one: Tensor) -> Tensor:
            return torch.empty_like(one, device=device) if one.is_meta else one.to(device)

        self._apply(allocated)  # type: ignore[no-untyped-call]

    def attention_in_words(self) -> str | None:
        """What computes attention in a forward pass on this device and in this dtype; None in models without it."""
        return None


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
