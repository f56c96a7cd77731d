"""AffineOperator: the classical, exactly associative case, composition of diagonal affine maps h → a ∘ h + b.

A state packs the pair [a; b] in its width. Scanning it solves the diagonal linear recurrence h_t = a_t ∘ h_{t-1} + b_t
from h_{-1} = 0: the second half of prefix t is h_t. Useful as a check against a plain loop.
"""

from dataclasses import dataclass

import torch
from torch import nn

from logdepth.shapes import Rows


@dataclass(frozen=True, kw_only=True)
class AffineConfig:
    width: int
    """Numbers in one state: half of them are a, half are b, so it is even."""

    def build(self) -> "AffineOperator":
        return AffineOperator(self.width)


class AffineOperator(nn.Module):
    """(a_1, b_1) ⊙ (a_2, b_2) = (a_2 ∘ a_1, a_2 ∘ b_1 + b_2) on `[rows, width]`; it has no weights."""

    def __init__(self, width: int) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"width must be even, half for a and half for b; got {width}")
        self.width = width

    def forward(self, left: Rows, right: Rows) -> Rows:
        left_scale, left_shift = left.chunk(2, dim=-1)
        right_scale, right_shift = right.chunk(2, dim=-1)
        return torch.cat([right_scale * left_scale, torch.addcmul(right_shift, right_scale, left_shift)], dim=-1)
