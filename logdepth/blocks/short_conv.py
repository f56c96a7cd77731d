"""A causal depthwise convolution over the last few tokens, with SiLU; other blocks use it."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logdepth.blocks.block import TensorState
from logdepth.blocks.layout import Layout


class ShortConv(nn.Module):
    """SiLU(Σ_j w_j ∘ x_{t-j}) over the last `size` tokens of each row or document."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.width, self.size = width, size
        self.weight = nn.Parameter(torch.empty(size, width))
        nn.init.uniform_(self.weight, -(size**-0.5), size**-0.5)

    def forward(self, x: Tensor, state: TensorState | None, layout: Layout) -> tuple[Tensor, TensorState]:
        rows = layout.to_rows(x)
        before = rows.new_zeros(len(rows), self.size - 1, self.width) if state is None else state.tensors[0]
        window = torch.cat([before.to(rows.dtype), rows], dim=1)
        length = rows.shape[1]
        out = rows.new_zeros(rows.shape)
        for tap in range(self.size):  # the last tap is the token itself
            out = torch.addcmul(out, window[:, tap : tap + length], self.weight[tap].to(rows.dtype))
        return layout.from_rows(F.silu(out)), TensorState((layout.latest(window, self.size - 1),))

    def init_state(self, batch: int) -> TensorState:
        return TensorState((self.weight.new_zeros(batch, self.size - 1, self.width),))
