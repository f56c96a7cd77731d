"""The Transformer that the paper compares with, as a preset: pre-norm, GELU, ALiBi or sinusoidal positions."""

import re
from dataclasses import dataclass, replace
from typing import Literal

from logdepth.blocks import AttentionConfig, MLPConfig
from logdepth.models.language_model import Size
from logdepth.models.lm import LM, LMConfig
from logdepth.ops.attention import AttentionBackend
from logdepth.ranges import check_dropouts, check_layers

ATTENTION, MLP = 0, 1
"""The blocks of a layer, in their order."""
PARTS = {
    "attention_norm": (ATTENTION, "norm"),
    "attention.into_heads": (ATTENTION, "into_heads"),
    "attention.out": (ATTENTION, "out"),
    "mlp_norm": (MLP, "norm"),
    "mlp_hidden": (MLP, "hidden"),
    "mlp_out": (MLP, "out"),
}
"""The parts of a layer as runs of version 1 call them: which block of the layer they are in, and their name there."""


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A pre-norm Transformer with GELU and hidden layers of four times its width."""

    embed_width: int = 256
    """Width E of embedding and residual stream."""
    num_layers: int = 4
    """Number of layers, each of attention and an MLP."""
    num_heads: int = 8
    """Number of attention heads, which share the width evenly."""
    positions: Literal["alibi", "sinusoidal"] = "alibi"
    """How the order of tokens enters: a bias on attention by distance, or sinusoids on the embedding."""
    tied: bool = True
    """Whether the head is the embedding."""
    dropout: float = 0.0
    """Dropout on the embedding and on what each attention and each MLP adds."""
    attention: AttentionBackend = "auto"
    """What computes attention; auto: FlexAttention for ALiBi on CUDA, SDPA otherwise."""

    def __post_init__(self) -> None:
        if min(self.embed_width, self.num_heads) < 1:
            raise ValueError("embed_width and num_heads must be at least 1")
        check_layers("num_layers", self.num_layers)
        if self.embed_width % self.num_heads:
            raise ValueError(f"embed_width {self.embed_width} does not divide into {self.num_heads} heads")
        check_dropouts(self)

    def as_lm(self) -> LMConfig:
        """The same model as a tuple of blocks."""
        attention = AttentionConfig(
            heads=self.num_heads,
            positions="alibi" if self.positions == "alibi" else "none",
            norm="layer",
            bias=True,
            dropout=self.dropout,
            backend=self.attention,
        )
        return LMConfig(
            dim=self.embed_width,
            blocks=(attention, MLPConfig(activation="gelu", norm="layer", bias=True, dropout=self.dropout)),
            repeats=self.num_layers,
            positions="sinusoidal" if self.positions == "sinusoidal" else "none",
            scale_embedding=True,
            norm="layer",
            tied=self.tied,
            embed_dropout=self.dropout,
            initialisation="gpt2",
        )

    def build(self, vocab_size: int) -> LM:
        return LM(vocab_size, self.as_lm())

    @staticmethod
    def current_name(name: str) -> str | None:
        """The name of a weight today, from its name in a run of version 1; None for what is no weight any more."""
        if name == "slopes":  # a buffer that the config decides
            return None
        found = re.fullmatch(r"blocks\.(\d+)\.(.+)\.(weight|bias)", name)
        if found is None:
            return name
        place, part = PARTS[found[2]]
        return f"blocks.{2 * int(found[1]) + place}.{part}.{found[3]}"

    @classmethod
    def rows(cls, size: Size) -> dict[str, "TransformerConfig"]:
        """One for each kind of positions."""
        alibi = cls(
            embed_width=size.layer_width,
            num_layers=size.num_layers,
            num_heads=size.num_heads,
            tied=size.layers_tied,
            dropout=size.layer_dropout,
        )
        return {"transformer-alibi": alibi, "transformer-sinusoidal": replace(alibi, positions="sinusoidal")}
