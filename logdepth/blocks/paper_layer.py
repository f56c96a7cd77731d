"""The paper's layer: leaves, a scan with a learnable operator, and back to the width of the embedding.

h = W_in · LN(x)  [+ post-embedding net]      E → D
leaf = h + dropout(LN(h))
s = scan(⊙, leaves)                           one state for every prefix
y = W_out · s + 0.1 · x                       D → E
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from logdepth.blocks.block import Block
from logdepth.blocks.layout import Layout, StepLayout
from logdepth.operators import GRCConfig, OperatorConfig, PostMergeConfig
from logdepth.ops import LayerNorm, Linear, NormedLinear, TokenLookup, scaled_linear
from logdepth.ops.dispatch import is_unmodified
from logdepth.ops.dropout import drops
from logdepth.ranges import check_dropouts, check_finite
from logdepth.scanning import Operator, OperatorPair, ScanState, scan, sweeps_itself
from logdepth.scanning.static_state import StaticScanState
from logdepth.shapes import Batch, Packed


@dataclass(frozen=True, kw_only=True)
class PaperLayerConfig:
    """The paper's layer. Its operator has a width of its own."""

    operator: OperatorConfig = field(default_factory=lambda: GRCConfig(width=256))
    """The operator ⊙ and its width."""
    embedding_net: bool = False
    """Whether a post-embedding net precedes the scan."""
    post_merge: Literal["none", "up", "every"] = "none"
    """Which merges a net LN(x + fc(x)) follows: none, those of the up-sweep, or every one."""
    leaf_norm: bool = True
    """Whether leaves are h + dropout(LN(h)) instead of h."""
    input_residual: float = 0.1
    """The share of the layer's input that is added to its output."""
    residual: bool = True
    """Whether the output is added to the residual stream; otherwise it replaces the stream."""
    leaf_dropout: float = 0.0
    """Dropout on LN(h) of the leaves."""
    post_merge_dropout: float = 0.0
    """Dropout on what the post-merge net adds."""
    recompute: bool = False
    """Whether the backward pass recomputes merges instead of storing them, which takes less memory and more time."""

    def __post_init__(self) -> None:
        if self.operator.width < 1:
            raise ValueError(f"operator.width must be at least 1; got {self.operator.width}")
        if self.embedding_net and self.operator.width % 2:
            raise ValueError(
                f"the post-embedding net halves operator.width, which must be even; got {self.operator.width}"
            )
        check_finite("input_residual", self.input_residual)
        check_dropouts(self)

    def build(self, dim: int) -> "PaperLayer":
        return PaperLayer(dim, self)


ScanFunction = Callable[..., tuple[Tensor, Any]]


class PaperLayer(Block):
    """Leaves, a scan and an output projection; its state is O(log n)."""

    accepts_lookup = True

    def __init__(self, dim: int, config: PaperLayerConfig) -> None:
        super().__init__()
        width = config.operator.width
        self.config, self.width = config, width
        self.scan: ScanFunction = scanned
        """Makes the states of all prefixes; replaced where other trees than the scan's are studied."""
        self.norm = LayerNorm(dim)
        self.into_state = scaled_linear(dim, width)
        self.embedding_net = EmbeddingNet(width) if config.embedding_net else nn.Identity()
        self.leaf_norm = LayerNorm(width) if config.leaf_norm else None
        self.leaf_dropout = nn.Dropout(config.leaf_dropout)
        operator: nn.Module = config.operator.build()
        if config.post_merge != "none":
            operator = PostMergeConfig(width=width, dropout=config.post_merge_dropout).build(operator)
        self.operator = operator
        self.out_of_state = scaled_linear(width, dim)

    def forward(
        self, x: Tensor | TokenLookup, state: ScanState | StaticScanState | None, layout: Layout
    ) -> tuple[Tensor, ScanState | StaticScanState]:
        leaves = as_elements(self.operators(), self.leaves(x), state, self.into_state.weight.dtype)
        recompute = self.config.recompute and torch.is_grad_enabled()
        prefixes, state = self.scan(self.operators(), leaves, state, layout, recompute=recompute)
        return self.output(prefixes, x), state

    def leaves(self, x: Tensor | TokenLookup) -> Tensor:
        """The elements of the scan."""
        if isinstance(x, Tensor):
            return self._leaves(x)
        if drops(self.embedding_net):  # as modified ones may: the leaf of a token is then not the same each time
            return self._leaves(x.tensor())
        if self.leaf_norm is None or not drops(self.leaf_dropout):
            return x.map(self._leaves)
        return x.map_with_norm(self._hidden, self.leaf_norm, self.leaf_dropout)

    def output(self, prefixes: Tensor, x: Tensor | TokenLookup) -> Tensor:
        """The residual stream after the layer."""
        share = self.config.input_residual
        if isinstance(x, TokenLookup) and not is_unmodified(self.out_of_state, {"": Linear}):
            x = x.tensor()  # others may hold the output, which `add_to` would overwrite
        out: Tensor = self.out_of_state(prefixes)
        out = torch.add(out, x, alpha=share) if isinstance(x, Tensor) else x.add_to(out, share)
        if not self.config.residual:
            return out
        return out + (x if isinstance(x, Tensor) else x.tensor())

    def scan_operators(self) -> list[Operator | OperatorPair]:
        return [self.operators()]

    def operators(self) -> Operator | OperatorPair:
        """What the scan is given: one operator, or one for each sweep."""
        if self.config.post_merge == "up":
            return self.operator, self.operator.operator  # type: ignore[return-value]
        return self.operator

    def init_state(self, batch: int) -> ScanState:
        weight = self.into_state.weight
        return ScanState.empty(batch, self.width, dtype=weight.dtype, device=weight.device)

    def static_state(self, state: ScanState) -> StaticScanState:
        return StaticScanState.of(state)

    def residual_outputs(self) -> Sequence[nn.Linear]:
        return (self.out_of_state,)

    def initialise(self, deviation: float) -> None:
        """Nothing: the layer's own initialisation is the paper's."""

    def _hidden(self, x: Batch | Packed) -> Tensor:
        hidden: Tensor = self.embedding_net(self.into_state(self.norm(x)))
        return hidden

    def _leaves(self, x: Batch | Packed) -> Tensor:
        hidden = self._hidden(x)
        return hidden if self.leaf_norm is None else hidden + self.leaf_dropout(self.leaf_norm(hidden))


def as_elements(
    operator: Operator | OperatorPair,
    leaves: Tensor,
    state: ScanState | StaticScanState | None,
    dtype: torch.dtype,
) -> Tensor:
    """The leaves in the dtype of states: that of the state, or of the weights. Autocast must not decide it.

    Where nothing is continued, kernels keep states in the dtype of products.
    """
    if state is not None:
        return leaves.to(state.dtype)
    return leaves if sweeps_itself(operator, leaves) else leaves.to(dtype)


def scanned(
    operator: Operator | OperatorPair,
    leaves: Tensor,
    state: ScanState | StaticScanState | None,
    layout: Layout,
    *,
    recompute: bool = False,
) -> tuple[Tensor, Any]:
    """The states of all prefixes, and the scan's state after them; a static state is changed in place."""
    if isinstance(state, StaticScanState):
        assert isinstance(layout, StepLayout)
        return state.advance(operator, leaves[:, 0], layout.step, layout.index)[:, None], state
    return scan(operator, leaves, state, lengths=layout.lengths, cu_seqlens=layout.cu_seqlens, checkpoint=recompute)


class EmbeddingNet(nn.Module):
    """The post-embedding net of the paper: a position-wise residual MLP of 17.5 · D² weights before the scan.

    stem D → D; two blocks D → D → D; four bottlenecks 2D → D/2 → D/2 → 2D, of which the first starts from D; 2D → D;
    and a residual around it all. LayerNorm after every linear map except the projected skip, SiLU between.
    """

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
