"""The encoder of "Length Generalization with Log-Depth Recurrent Units": one answer for a whole sequence.

leaf = LN(e) + FFN(LN(e))                                e: the token's embedding, FFN: D → 4D → D, ReLU
merged = LN(m + fc(m)),   m = left ⊙ right               fc: D → 4D → D, ReLU, shared by all levels
answer = W · root
"""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logdepth.operators import MLPLDRUConfig, OperatorConfig
from logdepth.ops import LayerNorm, Linear, scaled_linear
from logdepth.ranges import check_dropouts
from logdepth.scanning import reduce
from logdepth.shapes import Rows, Tokens

SCALE = 0.02
"""Scale of the initial weights of the embedding and of fc."""


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """A tree of merges over a whole sequence, and a linear classifier of its root."""

    operator: OperatorConfig = field(default_factory=lambda: MLPLDRUConfig.original(width=64))
    """The operator ⊙ and its width, which is also that of the embedding."""
    remainder: Literal["zero", "fold"] = "zero"
    """What becomes of the last node of a level with an odd number. zero: it is merged with zeros, which are the left
    operand, as in the paper's code. fold: nodes over 1, 2, 4, … tokens are folded from left to right, as in this
    library's scan."""
    dropout: float = 0.0
    """Dropout on leaves and on merged states."""

    def __post_init__(self) -> None:
        if self.remainder not in ("zero", "fold"):
            raise ValueError(f"remainder must be zero or fold; got '{self.remainder}'")
        check_dropouts(self)

    def build(self, num_symbols: int, num_classes: int) -> "Encoder":
        return Encoder(num_symbols, num_classes, self)


class Encoder(nn.Module):
    """Logits `[batch, classes]` from tokens `[batch, length]`."""

    def __init__(self, num_symbols: int, num_classes: int, config: EncoderConfig) -> None:
        super().__init__()
        width = config.operator.width
        self.config = config
        self.embedding = nn.Embedding(num_symbols, width)
        nn.init.trunc_normal_(self.embedding.weight, std=SCALE, a=-2 * SCALE, b=2 * SCALE)
        self.norm = LayerNorm(width)
        self.hidden, self.out = _linear(width, 4 * width), _linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)
        self.merge = Merge(config.operator, config.dropout)
        self.classifier = _linear(width, num_classes)

    def forward(self, tokens: Tokens) -> Tensor:
        logits: Tensor = self.classifier(self.root(self.leaves(tokens)))
        return logits

    def leaves(self, tokens: Tokens) -> Tensor:
        """The elements that are merged, `[batch, length, width]`."""
        states = self.norm(self.embedding(tokens))
        leaves: Tensor = self.dropout(states + self.out(F.relu(self.hidden(states))))
        return leaves

    def root(self, states: Tensor) -> Tensor:
        """The state of each whole sequence, `[batch, width]`."""
        if self.config.remainder == "fold":
            return reduce(self.merge, states)
        batch, _, width = states.shape
        while states.shape[1] > 1:
            if states.shape[1] % 2:
                states = torch.cat([states[:, :-1], torch.zeros_like(states[:, :1]), states[:, -1:]], dim=1)
            left, right = states.view(batch, -1, 2, width).unbind(2)
            states = self.merge(left.reshape(-1, width), right.reshape(-1, width)).view(batch, -1, width)
        return states[:, 0]


class Merge(nn.Module):
    """An operator, and what follows every merge of the encoder: dropout(LN(m + fc(m)))."""

    def __init__(self, operator: OperatorConfig, dropout: float) -> None:
        super().__init__()
        width = operator.width
        self.operator: nn.Module = operator.build()
        self.hidden = scaled_linear(width, 4 * width, SCALE)
        self.out = scaled_linear(4 * width, width, SCALE)
        self.norm = LayerNorm(width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, left: Rows, right: Rows) -> Rows:
        merged = self.operator(left, right)
        refined: Rows = self.dropout(self.norm(merged + self.out(F.relu(self.hidden(merged)))))
        return refined


def _linear(in_width: int, out_width: int) -> Linear:
    """A layer with the initial weights of Haiku, which the paper's code uses: 1/√in times a normal cut off at 2."""
    layer, deviation = scaled_linear(in_width, out_width), in_width**-0.5
    nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)
    return layer
