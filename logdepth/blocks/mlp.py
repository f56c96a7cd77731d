"""MLP block: x + dropout(W_out · act(W_in · norm(x))), position by position."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn import functional as F

from logdepth.blocks.block import Block
from logdepth.blocks.layout import Layout
from logdepth.ops import Linear, NormName, norm_named
from logdepth.ranges import check_dropouts

DEFAULT_MULTIPLES = {"gelu": 4.0, "swiglu": 8 / 3}
MAX_MULTIPLE = 1_000_000


@dataclass(frozen=True, kw_only=True)
class MLPConfig:
    """A multilayer perceptron with one hidden layer."""

    activation: Literal["gelu", "swiglu"] = "swiglu"
    """Activation of the hidden layer; swiglu has a gate, and so a third matrix."""
    multiple: float | None = None
    """Width of the hidden layer over the model's width; by default 4 for gelu and 8/3 for swiglu."""
    norm: NormName = "rms"
    """Norm before the block: layer or rms."""
    bias: bool = False
    """Whether the linear maps have biases."""
    dropout: float = 0.0
    """Dropout on what the block adds to the residual stream."""

    def __post_init__(self) -> None:
        if self.multiple is not None and not 0 < self.multiple <= MAX_MULTIPLE:
            raise ValueError(f"multiple must be above 0 and at most {MAX_MULTIPLE:,}; got {self.multiple}")
        check_dropouts(self)

    def build(self, dim: int) -> "MLPBlock":
        return MLPBlock(dim, self)


class MLPBlock(Block):
    """Pre-norm MLP; it remembers nothing."""

    def __init__(self, dim: int, config: MLPConfig) -> None:
        super().__init__()
        multiple = config.multiple or DEFAULT_MULTIPLES[config.activation]
        self.gated = config.activation == "swiglu"
        width = max(8, round(multiple * dim / 8) * 8) if self.gated else round(multiple * dim)
        self.norm = norm_named(config.norm, dim)
        self.hidden = Linear(dim, 2 * width if self.gated else width, bias=config.bias)
        self.out = Linear(width, dim, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        del layout
        hidden = self.hidden(self.norm(x))
        if self.gated:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * value
        else:
            hidden = F.gelu(hidden)
        return x + self.dropout(self.out(hidden)), state

    def residual_outputs(self) -> Sequence[nn.Linear]:
        return (self.out,)
