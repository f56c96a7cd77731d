"""GRC, the Gated Recursive Cell (Shen et al. 2019): the operator ⊙ of the paper's AR-GRC model.

[g_a; g_b; g_c; c] = W2 · act(W1 · [a; b] + b1) + b2          W1: 2D → 4D, W2: 4D → 4D
a ⊙ b = LN(σ(g_a) ∘ a + σ(g_b) ∘ b + σ(g_c) ∘ c)
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from logdepth.operators.fused.operator import FusedOperator
from logdepth.ops import LayerNorm, Linear, scaled_linear, use_kernels
from logdepth.ops.activation import ActivationName, activation_named
from logdepth.ops.dropout import drops
from logdepth.ranges import check_dropouts
from logdepth.shapes import Rows

if TYPE_CHECKING:  # it needs Triton
    from logdepth.operators.grc.fused import GRCCell


@dataclass(frozen=True, kw_only=True)
class GRCConfig:
    """The Gated Recursive Cell."""

    width: int
    """Width D of a state."""
    activation: ActivationName = "silu"
    """Activation of the hidden layer. The paper's code uses SiLU; Ordered Memory used ReLU."""
    dropout: float = 0.0
    """Dropout on the pair of operands and on the hidden layer."""

    def __post_init__(self) -> None:
        check_dropouts(self)

    def build(self) -> "GRC":
        return GRC(self.width, activation=self.activation, dropout=self.dropout)


class GRC(FusedOperator):
    """The Gated Recursive Cell on `[rows, width]`."""

    def __init__(self, width: int, *, activation: ActivationName = "silu", dropout: float = 0.0) -> None:
        super().__init__()
        self.width = width
        self.hidden = scaled_linear(2 * width, 4 * width)
        self.gates = scaled_linear(4 * width, 4 * width)
        self.norm = LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.activation = activation_named(activation)

    def cell(self) -> "type[GRCCell]":
        from logdepth.operators.grc.fused import GRCCell

        return GRCCell

    def forward(self, left: Rows, right: Rows) -> Rows:
        if not torch.is_grad_enabled() and use_kernels(left) and not drops(self) and not self.why_plain(self, left):
            from logdepth.operators.grc.inference import merged_by_kernels

            return merged_by_kernels(self, left, right)
        pair = self.dropout(torch.cat([left, right], dim=-1))
        hidden = self.dropout(self.activation(self.hidden(pair)))
        left_gate, right_gate, candidate_gate, candidate = self.gates(hidden).chunk(4, dim=-1)
        gated = left_gate.sigmoid() * left + right_gate.sigmoid() * right + candidate_gate.sigmoid() * candidate
        merged: Rows = self.norm(gated)
        return merged


GRC.parts = {"": GRC, "hidden": Linear, "gates": Linear, "norm": LayerNorm, "dropout": nn.Dropout}
