"""MLP-LDRU (Pert et al. 2026): each operand is weighted element by element by an MLP of the pair, then mixed linearly.

[w_x; w_y] = W3 · act(W2 · act(W1 · [x; y]))                  widths 2D → 2D → 4D → 2D, with biases
x ⊙ y = Wo(Vx(w_x ∘ x) + Vy(w_y ∘ y))                         Vx, Vy, Wo: D × D with bias, identity at the start
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import nn

from logdepth.operators.fused.operator import FusedOperator
from logdepth.ops import LayerNorm, Linear, identity_linear, scaled_linear
from logdepth.ops.activation import ActivationName, activation_named
from logdepth.shapes import Rows

if TYPE_CHECKING:  # it needs Triton
    from logdepth.operators.mlp_ldru.fused import MLPLDRUCell


@dataclass(frozen=True, kw_only=True)
class MLPLDRUConfig:
    """The defaults are the language-model variant of the paper's ablation; `original` is the encoder's."""

    width: int
    """Width D of a state."""
    activation: ActivationName = "silu"
    """Activation of the two hidden layers of the MLP."""
    init_scale: float = 0.02
    """Scale of the MLP's variance-scaled initialisation."""
    norm_weights: bool = True
    """Whether the weights [w_x; w_y] are layer-normalised."""

    def __post_init__(self) -> None:
        if not 0 <= self.init_scale < float("inf"):
            raise ValueError(f"init_scale must be 0 or above, and finite; got {self.init_scale}")

    @classmethod
    def original(cls, width: int) -> Self:
        """As in "Length Generalization with Log-Depth Recurrent Units"."""
        return cls(width=width, activation="relu", init_scale=1.0, norm_weights=False)

    def build(self) -> "MLPLDRU":
        return MLPLDRU(
            self.width, activation=self.activation, init_scale=self.init_scale, norm_weights=self.norm_weights
        )


class MLPLDRU(FusedOperator):
    """The MLP log-depth recurrent unit on `[rows, width]`."""

    def __init__(
        self, width: int, *, activation: ActivationName = "silu", init_scale: float = 0.02, norm_weights: bool = True
    ) -> None:
        super().__init__()
        self.width = width
        self.first = scaled_linear(2 * width, 2 * width, init_scale)
        self.second = scaled_linear(2 * width, 4 * width, init_scale)
        self.weights = scaled_linear(4 * width, 2 * width, init_scale)
        self.norm = LayerNorm(2 * width) if norm_weights else nn.Identity()
        self.left_value = identity_linear(width)
        self.right_value = identity_linear(width)
        self.out = identity_linear(width)
        self.activation = activation_named(activation)

    def cell(self) -> "type[MLPLDRUCell]":
        from logdepth.operators.mlp_ldru.fused import MLPLDRUCell

        return MLPLDRUCell

    def forward(self, left: Rows, right: Rows) -> Rows:
        hidden = self.activation(self.first(torch.cat([left, right], dim=-1)))
        weights = self.norm(self.weights(self.activation(self.second(hidden))))
        left_weight, right_weight = weights.chunk(2, dim=-1)
        merged: Rows = self.out(self.left_value(left_weight * left) + self.right_value(right_weight * right))
        return merged


MLPLDRU.parts = {
    "": MLPLDRU,
    "first": Linear,
    "second": Linear,
    "weights": Linear,
    "norm": LayerNorm,
    "left_value": Linear,
    "right_value": Linear,
    "out": Linear,
}
