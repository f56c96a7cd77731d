"""What every language model has: `forward`, `init_state`, `step`, and a config that can be had at a size."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, Self

from torch import Tensor, nn
from torch.nn import functional as F

from logdepth.scanning import LengthsLike
from logdepth.shapes import Tokens


@dataclass(frozen=True, kw_only=True)
class Size:
    """What models that are to be compared have in common: one column of the paper's tables."""

    embed_width: int
    """E of a ScanLM."""
    state_width: int
    """D, the numbers in a recurrent state."""
    nets: bool = True
    """Whether a ScanLM has its post-embedding and post-merge nets."""
    dropout: float = 0.0
    """Of a ScanLM, wherever the paper's has it."""
    layer_width: int
    """Of a stack of layers: a Transformer, or another baseline."""
    num_layers: int
    num_heads: int
    layers_tied: bool = True
    """Whether such a stack's head is its embedding."""
    layer_dropout: float = 0.0


class ModelConfig(Protocol):
    """The config of a model; frozen, keyword-only, strict about its values."""

    def build(self, vocab_size: int) -> "LanguageModel": ...

    @classmethod
    def rows(cls, size: Size) -> "Mapping[str, ModelConfig]":
        """The rows of a table that are this kind of model at a size: each becomes a recipe, under its name."""
        ...


class ModelState(Protocol):
    """Where a batch of streams stands; never changed in place, so that it can be continued twice."""

    @property
    def lengths(self) -> Tensor:
        """Tokens absorbed so far by each row: int64, on the CPU."""
        ...

    @property
    def nbytes(self) -> int: ...

    def select(self, rows: Sequence[int] | Tensor) -> Self:
        """The given rows, in the given order; a row may come twice or not at all."""
        ...

    def detach(self) -> Self: ...


class LanguageModel(nn.Module, ABC):
    """A causal model of tokens; a stream gives the logits of the whole."""

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
        """The state of `batch` streams that have seen nothing."""

    @abstractmethod
    def step(self, tokens: Tokens, state: Any, *, lengths: LengthsLike | None = None) -> tuple[Tensor, Any]:
        """Any number of further tokens `[batch, length]` of every stream: their logits, and the state after them."""

    def loss(self, tokens: Tokens, targets: Tokens, *, cu_seqlens: LengthsLike | None = None) -> Tensor:
        """Mean cross-entropy of the next tokens, in nats. Models whose head is one matrix do without all the logits."""
        logits = self(tokens, cu_seqlens=cu_seqlens)
        return F.cross_entropy(logits.float().flatten(0, -2), targets.flatten())

    def accelerate(self) -> str | None:
        """Compute with fused kernels from now on, with the same answers to rounding.

        None, or in one line why the model goes on as it is. A model without such kernels still has its CUDA graphs.
        """
        kind = next(self.parameters()).device.type
        return None if kind == "cuda" else f"CUDA graphs need a CUDA GPU; this is the {kind}"

    def weights_held(self) -> AbstractContextManager[None]:
        """A scope in which the weights do not change: what depends on them alone need not be computed in every pass.

        A CUDA graph that is captured inside it is one of these weights.
        """
        return nullcontext()

    def attention_in_words(self) -> str | None:
        """What computes attention in a forward pass on this device and in this dtype; None in models without it."""
        return None


def going_on_without(reason: str) -> str:
    """What a program says that was to accelerate a model, and goes on where it cannot."""
    return f"{reason}; going on without"


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())
