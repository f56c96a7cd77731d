"""GRC, the Gated Recursive Cell (Shen et al. 2019): the operator ⊙ of the paper's AR-GRC model.

[g_a; g_b; g_c; c] = W2 · act(W1 · [a; b] + b1) + b2          W1: 2D → 4D, W2: 4D → 4D
a ⊙ b = LN(σ(g_a) ∘ a + σ(g_b) ∘ b + σ(g_c) ∘ c)
"""

from dataclasses import dataclass

import torch
from torch import nn

from logdepth.operators.activation import ActivationName, activation_named
from logdepth.operators.initialisation import scaled_linear
from logdepth.ranges import check_dropouts
from logdepth.shapes import Rows


@dataclass(frozen=True, kw_only=True)
class GRCConfig:
    width: int
    """D, the numbers in one state."""
    activation: ActivationName = "silu"
    """Of the hidden layer. The paper's code uses SiLU, Ordered Memory used ReLU."""
    dropout: float = 0.0
    """Applied to the pair of operands on its way into the cell, and to the hidden layer."""

    def __post_init__(self) -> None:
        check_dropouts(self)

    def build(self) -> "GRC":
        return GRC(self.width, activation=self.activation, dropout=self.dropout)


class GRC(nn.Module):
    """The Gated Recursive Cell on `[rows, width]`."""

    def __init__(self, width: int, *, activation: ActivationName = "silu", dropout: float = 0.0) -> None:
        super().__init__()
        self.width = width
        self.hidden = scaled_linear(2 * width, 4 * width)
        self.gates = scaled_linear(4 * width, 4 * width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.activation = activation_named(activation)

    def forward(self, left: Rows, right: Rows) -> Rows:
        pair = self.dropout(torch.cat([left, right], dim=-1))
        hidden = self.dropout(self.activation(self.hidden(pair)))
        left_gate, right_gate, candidate_gate, candidate = self.gates(hidden).chunk(4, dim=-1)
        gated = left_gate.sigmoid() * left + right_gate.sigmoid() * right + candidate_gate.sigmoid() * candidate
        merged: Rows = self.norm(gated)
        return merged
