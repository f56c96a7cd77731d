"""The post-embedding net: a position-wise residual MLP of 17.5 · D² weights between the embedding and the scan.

stem D → D; two blocks D → D → D; four bottlenecks 2D → D/2 → D/2 → 2D, of which the first starts from D; 2D → D; and a
residual around it all. LayerNorm after every linear map but the projected skip, SiLU between.
"""

import itertools
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn import functional as F

from logdepth.operators.initialisation import scaled_linear

if TYPE_CHECKING:
    from logdepth.fused.casts import Casts
    from logdepth.fused.layers import Layer


class EmbeddingNet(nn.Module):
    """`[…, width]` to `[…, width]`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = _normed_linear(width, width)
        self.blocks = nn.Sequential(
            _Residual(width, width, width),
            _Residual(width, width, width),
            _Residual(width, width // 2, width // 2, 2 * width),
            *(_Residual(2 * width, width // 2, width // 2, 2 * width) for _ in range(3)),
        )
        self.out = _normed_linear(2 * width, width)

    def forward(self, states: Tensor) -> Tensor:
        refined: Tensor = self.out(self.blocks(F.silu(self.stem(states))))
        return states + refined

    def fused(self, casts: "Casts", states: Tensor) -> Tensor:
        """The same by fused kernels, of `[rows, width]` in the dtype of the products."""
        from logdepth.fused.layers import Layer, through_layers

        layers = [Layer(*_pair(self.stem), source=0)]
        for block in self.blocks:
            assert isinstance(block, _Residual)
            block.add_layers(layers)
        layers.append(Layer(*_pair(self.out), source=len(layers), skip=0, silu=False))
        return through_layers(casts, layers, states)


class _Residual(nn.Module):
    """Linear maps through the given widths, and a skip around them that is projected where the widths differ."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.maps = nn.ModuleList(_normed_linear(before, after) for before, after in itertools.pairwise(widths))
        self.skip = nn.Identity() if widths[0] == widths[-1] else scaled_linear(widths[0], widths[-1])

    def forward(self, states: Tensor) -> Tensor:
        *hidden, last = self.maps
        inner = states
        for one in hidden:
            inner = F.silu(one(inner))
        return F.silu(self.skip(states) + last(inner))

    def add_layers(self, layers: "list[Layer]") -> None:
        """Its layers, after those that there are."""
        from logdepth.fused.layers import Layer

        before = skip = len(layers)
        *hidden, last = self.maps
        for one in hidden:
            layers.append(Layer(*_pair(one), source=len(layers)))
        inner = len(layers)
        if isinstance(self.skip, nn.Linear):
            layers.append(Layer(self.skip, None, source=before))
            skip = len(layers)
        layers.append(Layer(*_pair(last), source=inner, skip=skip))


def _normed_linear(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(scaled_linear(before, after), nn.LayerNorm(after))


def _pair(normed_linear: nn.Module) -> tuple[nn.Linear, nn.LayerNorm]:
    linear, norm = normed_linear.children()
    assert isinstance(linear, nn.Linear)
    assert isinstance(norm, nn.LayerNorm)
    return linear, norm
