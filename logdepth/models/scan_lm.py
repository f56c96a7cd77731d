"""The paper's language model as a preset: tokens → embedding → scan layers → logits through the tied embedding.

Depth 1 is the paper's. A deeper model has a residual around every layer but the first.
"""

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from logdepth.blocks import PaperLayerConfig
from logdepth.models.language_model import Size
from logdepth.models.lm import LM, LMConfig
from logdepth.operators import OPERATORS, GRCConfig, OperatorConfig
from logdepth.ranges import check_dropouts, check_finite, check_layers

WITHOUT_WEIGHTS = {"affine"}
"""Operators that check the scan and learn nothing."""


@dataclass(frozen=True, kw_only=True)
class ScanLMConfig:
    """The paper's model. The width D of its states is the operator's."""

    embed_width: int = 256
    """Width E of the token embedding."""
    operator: OperatorConfig = field(default_factory=lambda: GRCConfig(width=256))
    """The operator ⊙ and its width."""
    depth: int = 1
    """Number of layers, each a whole model of the paper between embedding and head."""
    embedding_net: bool = True
    """Whether a post-embedding net precedes the scan."""
    post_merge: Literal["none", "up", "every"] = "up"
    """Which merges a net LN(x + fc(x)) follows: none, the up-sweep's (the paper's code), or every one (its text)."""
    leaf_norm: bool = True
    """Whether leaves are h + dropout(LN(h)) instead of h."""
    input_residual: float = 0.1
    """The share of a layer's input that is added to its output."""
    tied: bool = True
    """Whether the head is the embedding."""
    embed_dropout: float = 0.0
    """Dropout on the token embeddings."""
    leaf_dropout: float = 0.0
    """Dropout on LN(h) of the leaves."""
    post_merge_dropout: float = 0.0
    """Dropout on what the post-merge net adds."""
    output_dropout: float = 0.0
    """Dropout on what the head reads."""
    recompute: bool = False
    """Whether the backward pass recomputes merges instead of storing them, which takes less memory and more time."""

    def __post_init__(self) -> None:
        if min(self.embed_width, self.operator.width) < 1:
            raise ValueError("embed_width and operator.width must be at least 1")
        check_layers("depth", self.depth)
        if self.embedding_net and self.operator.width % 2:
            raise ValueError(
                f"the post-embedding net halves operator.width, which must be even; got {self.operator.width}"
            )
        check_finite("input_residual", self.input_residual)
        check_dropouts(self)

    @property
    def width(self) -> int:
        return self.operator.width

    def as_lm(self) -> LMConfig:
        """The same model as a tuple of blocks."""
        first = PaperLayerConfig(
            operator=self.operator,
            embedding_net=self.embedding_net,
            post_merge=self.post_merge,
            leaf_norm=self.leaf_norm,
            input_residual=self.input_residual,
            residual=False,
            leaf_dropout=self.leaf_dropout,
            post_merge_dropout=self.post_merge_dropout,
            recompute=self.recompute,
        )
        return LMConfig(
            dim=self.embed_width,
            blocks=(first, *(dataclasses.replace(first, residual=True),) * (self.depth - 1)),
            norm="none",
            tied=self.tied,
            embed_dropout=self.embed_dropout,
            output_dropout=self.output_dropout,
            initialisation="paper",
        )

    def build(self, vocab_size: int) -> LM:
        return LM(vocab_size, self.as_lm())

    @staticmethod
    def current_name(name: str) -> str | None:
        """The name of a weight today, from its name in a run of version 1."""
        return f"blocks.{name.removeprefix('layers.')}" if name.startswith("layers.") else name

    @classmethod
    def rows(cls, size: Size) -> dict[str, "ScanLMConfig"]:
        """`ar-grc`, `ar-mlp-ldru`, and likewise for every operator."""
        return {f"ar-{name}": cls._row(name, size) for name in OPERATORS if name not in WITHOUT_WEIGHTS}

    @classmethod
    def _row(cls, operator: str, size: Size) -> "ScanLMConfig":
        config = OPERATORS[operator]
        has_dropout = "dropout" in (field.name for field in dataclasses.fields(config))
        return cls(
            embed_width=size.embed_width,
            operator=config(width=size.state_width, **({"dropout": size.dropout} if has_dropout else {})),
            embedding_net=size.nets,
            post_merge="up" if size.nets else "none",
            leaf_dropout=size.dropout,
            post_merge_dropout=size.dropout if size.nets else 0.0,
        )
