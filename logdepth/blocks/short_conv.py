"""A causal depthwise convolution over the last few tokens, with SiLU; other blocks use it."""

import torch
from torch import Tensor, nn

from logdepth.blocks.block import TensorState
from logdepth.blocks.layout import Layout
from logdepth.ops import short_conv


class ShortConv(nn.Module):
    """SiLU(Σ_j w_j ∘ x_{t-j}) over the last `size` tokens of each row or document."""

    def __init__(self, width: int, size: int) -> None:
        super().__init__()
        self.width, self.size = width, size
        self.weight = nn.Parameter(torch.empty(size, width))
        nn.init.uniform_(self.weight, -(size**-0.5), size**-0.5)

    def forward(self, x: Tensor, state: TensorState | None, layout: Layout) -> tuple[Tensor, TensorState]:
        rows = layout.to_rows(x)
        before = None if state is None else state.tensors[0]
        out = short_conv(rows, before, self.weight)
        if before is None:
            before = rows.new_zeros(len(rows), self.size - 1, self.width)
        whole = layout.lengths is None and not layout.packed
        late = rows[:, max(0, rows.shape[1] - self.size + 1) :] if whole else rows
        window = torch.cat([before.to(rows.dtype), late], dim=1)
        return layout.from_rows(out), TensorState((layout.latest(window, self.size - 1),))

    def init_state(self, batch: int) -> TensorState:
        return TensorState((self.weight.new_zeros(batch, self.size - 1, self.width),))
