"""PostMerge: a residual net after a merge, LN(x + fc(x)), shared by all merges of a scan (paper, the language model).

merged ← LN(merged + fc(merged)),   fc = W2 · act(W1 · x), D → hidden · D → D, then dropout
"""

from dataclasses import dataclass
from typing import Self

from torch import nn

from logdepth.operators.activation import ActivationName, activation_named
from logdepth.operators.initialisation import scaled_linear
from logdepth.ranges import check_dropouts
from logdepth.scanning import Operator
from logdepth.shapes import Rows


@dataclass(frozen=True, kw_only=True)
class PostMergeConfig:
    """The defaults are the language model's; `original` is that of the encoder with MLP-LDRU."""

    width: int
    """D, the numbers in one state."""
    hidden_multiple: int = 2
    """Hidden width over `width`."""
    activation: ActivationName = "silu"
    """Of the hidden layer."""
    init_scale: float = 1.0
    """Scale of the variance-scaled initialisation."""
    dropout: float = 0.0
    """Applied to what is added."""

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


class PostMerge(nn.Module):
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
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.activation = activation_named(activation)

    def forward(self, left: Rows, right: Rows) -> Rows:
        merged = self.operator(left, right)
        refined: Rows = self.norm(merged + self.dropout(self.out(self.activation(self.hidden(merged)))))
        return refined
