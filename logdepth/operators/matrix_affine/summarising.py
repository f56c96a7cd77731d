"""SummarisingOperator: merges of memories that also merge a summary of each block, on which they may depend."""

from typing import Literal

import torch
from torch import Tensor, nn

from logdepth.operators.grc import GRC
from logdepth.operators.matrix_affine.matrix_affine import MatrixAffineOperator
from logdepth.ops import LayerNorm, Linear
from logdepth.shapes import Rows

SummaryMerge = Literal["mean", "grc"]
FIRST_GATE_BIAS = 4.0
"""With which the first gates are 0.98: nearly everything is kept."""


class SummarisingOperator(nn.Module):
    """Merges memories [M | S] of all heads and, behind them in each row, vectors that summarise what was read.

        s = (s_L + s_R) / 2, or GRC(s_L, s_R)              of two blocks of equal length, for all heads together
        g = σ(W [s_L; s_R] + b), or 1                      for each key channel of each head
        (M, S) = (M_R diag(g) M_L, M_R diag(g) S_L + S_R)

    With a GRC or with gates it is not associative.

    Args:
        memories: the operator of memories without summaries.
        width: width of a head's summary.
        merge: how summaries are merged.
        gated: whether there are gates; 1 is the largest, so that products over many levels stay bounded.
    """

    def __init__(self, memories: MatrixAffineOperator, width: int, *, merge: SummaryMerge, gated: bool) -> None:
        super().__init__()
        self.memories, self.summary_width = memories, memories.heads * width
        self.width = memories.width + self.summary_width
        self.leaf_norm = LayerNorm(self.summary_width) if merge == "grc" else None
        self.grc = GRC(self.summary_width) if merge == "grc" else None
        self.gates = Linear(2 * self.summary_width, memories.heads * memories.widths[0]) if gated else None
        if self.gates is not None:
            nn.init.zeros_(self.gates.weight)
            nn.init.constant_(self.gates.bias, FIRST_GATE_BIAS)

    def forward(self, left: Rows, right: Rows) -> Rows:
        earlier, left_summary = self.parts(left)
        later, right_summary = self.parts(right)
        if self.gates is not None:
            both = torch.cat([left_summary, right_summary], dim=-1)
            kept = self.gates(both.to(self.gates.weight.dtype)).to(left.dtype).sigmoid()
            matrices = self.memories.matrices(earlier)
            earlier = (kept.view(*matrices.shape[:3], 1) * matrices).flatten(1)
        if self.grc is None:
            summary = (left_summary + right_summary) / 2
        else:
            dtype = self.grc.norm.weight.dtype
            summary = self.grc(left_summary.to(dtype), right_summary.to(dtype)).to(left.dtype)
        return torch.cat([self.memories(earlier, later), summary], dim=-1)

    def leaves(self, opened: Rows, chunk: int) -> Rows:
        """Complete chunks as leaves: what was the sum over their tokens becomes a summary."""
        memories, sums = self.parts(opened)
        summary = sums / chunk
        if self.leaf_norm is not None:
            summary = self.leaf_norm(summary.to(self.leaf_norm.weight.dtype)).to(opened.dtype)
        return torch.cat([memories, summary], dim=-1)

    def parts(self, rows: Rows) -> tuple[Tensor, Tensor]:
        """The memories of each row, and the summaries or sums behind them."""
        memories, summaries = torch.split(rows, [self.memories.width, self.summary_width], dim=-1)
        return memories, summaries
