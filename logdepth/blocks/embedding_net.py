"""The post-embedding net of the paper: a position-wise residual MLP of 17.5 · D² weights before the scan.

stem D → D; two blocks D → D → D; four bottlenecks 2D → D/2 → D/2 → 2D, of which the first starts from D; 2D → D; and a
residual around it all. LayerNorm after every linear map except the projected skip, SiLU between.
"""

import itertools

from torch import Tensor, nn

from logdepth.ops import NormedLinear, scaled_linear


class EmbeddingNet(nn.Module):
    """`[…, width]` to `[…, width]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = NormedLinear(width, width)
        self.blocks = nn.Sequential(
            _Residual(width, width, width),
            _Residual(width, width, width),
            _Residual(width, width // 2, width // 2, 2 * width),
            *(_Residual(2 * width, width // 2, width // 2, 2 * width) for _ in range(3)),
        )
        self.out = NormedLinear(2 * width, width)

    def forward(self, states: Tensor) -> Tensor:
        refined: Tensor = self.out(self.blocks(self.stem(states, activation="silu")), skip=states)
        return refined


class _Residual(nn.Module):
    """Linear maps through the given widths, and a skip around them that is projected where the widths differ."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(NormedLinear(before, after) for before, after in itertools.pairwise(widths))
        self.skip = nn.Identity() if widths[0] == widths[-1] else scaled_linear(widths[0], widths[-1])

    def forward(self, states: Tensor) -> Tensor:
        *hidden, last = self.maps
        inner = states
        for one in hidden:
            inner = one(inner, activation="silu")
        out: Tensor = last(inner, skip=self.skip(states), activation="silu")
        return out
