"""PostMerge: a residual net after a merge, LN(x + fc(x)), shared by all merges of a scan (paper, the language model).

merged ← LN(merged + fc(merged)),   fc = W2 · act(W1 · x), D → hidden · D → D, then dropout
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from logdepth.operators.fused.operator import FusedOperator
from logdepth.ops import LayerNorm, Linear, scaled_linear, use_kernels
from logdepth.ops.activation import ActivationName, activation_named
from logdepth.ops.dropout import drops
from logdepth.ranges import check_dropouts
from logdepth.scanning import Operator
from logdepth.shapes import Rows

if TYPE_CHECKING:  # it needs Triton
    from logdepth.operators.fused.cell import Cell


@dataclass(frozen=True, kw_only=True)
class PostMergeConfig:
    """The defaults are the language model's; `original` is that of the encoder with MLP-LDRU."""

    width: int
    """Width D of a state."""
    hidden_multiple: int = 2
    """Width of the hidden layer, as a multiple of `width`."""
    activation: ActivationName = "silu"
    """Activation of the hidden layer."""
    init_scale: float = 1.0
    """Scale of the variance-scaled initialisation."""
    dropout: float = 0.0
    """Dropout on what the net adds."""

    @classmethod
    def original(cls, width: int) -> Self:
        """As in "Length Generalization with Log-Depth Recurrent Units"."""
        return cls(width=width, hidden_multiple=4, activation="relu", init_scale=0.02)

    def __post_init__(self) -> None:
        check_dropouts(self)

    def build(self, operator: Operator) -> "PostMerge":
        return PostMerge(
            operator,
            self.width,
            hidden_multiple=self.hidden_multiple,
            activation=self.activation,
            init_scale=self.init_scale,
            dropout=self.dropout,
        )


class PostMerge(FusedOperator):
    """An operator followed by LN(x + fc(x)).

    After every merge:                scan(post, elements)
    After the up-sweep's merges only: scan((post, post.operator), elements)   the paper's language model
    """

    def __init__(
        self,
        operator: Operator,
        width: int,
        *,
        hidden_multiple: int = 2,
        activation: ActivationName = "silu",
        init_scale: float = 1.0,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.width = width
        self.operator = operator
        self.hidden = scaled_linear(width, hidden_multiple * width, init_scale)
        self.out = scaled_linear(hidden_multiple * width, width, init_scale)
        self.norm = LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.activation = activation_named(activation)

    def cell(self) -> "type[Cell[Any, Any, Any]]":
        assert isinstance(self.operator, FusedOperator)
        return self.operator.cell()

    def parts_as_built(self) -> Mapping[str, type]:
        assert isinstance(self.operator, FusedOperator)
        inner = {f"operator.{name}".rstrip("."): kind for name, kind in self.operator.parts_as_built().items()}
        return {**self.parts, **inner}

    def fused_pair(self, down: Operator) -> tuple[FusedOperator, nn.Module | None, bool] | None:
        fits = isinstance(self.operator, FusedOperator) and not isinstance(self.operator, PostMerge)
        return (self.operator, self, down is self) if fits and (down is self or down is self.operator) else None  # type: ignore[return-value]

    def forward(self, left: Rows, right: Rows) -> Rows:
        merged = self.operator(left, right)
        if not torch.is_grad_enabled() and use_kernels(merged) and not drops(self) and not self.why_plain(self, merged):
            from logdepth.operators.fused.inference import refined_by_kernels

            return refined_by_kernels(self, merged)
        refined: Rows = self.norm(merged + self.dropout(self.out(self.activation(self.hidden(merged)))))
        return refined


PostMerge.parts = {"": PostMerge, "hidden": Linear, "out": Linear, "norm": LayerNorm, "dropout": nn.Dropout}
