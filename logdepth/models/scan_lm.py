"""ScanLM, the paper's language model: tokens → embedding → leaves → scan(⊙) → logits through the tied embedding.

x = embedding(token)                          V × E
h = W_in · LN(x)  [+ post-embedding net]      E → D
leaf = h + dropout(LN(h))
s = scan(⊙, leaves)                           one state for every prefix
y = W_out · s + 0.1 · x                       D → E
logits = embedding · y

Depth 1 is the paper's. A deeper model feeds y to further such layers, with a residual around each of them.
"""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logdepth.kernels import launched_where
from logdepth.losses import linear_cross_entropy
from logdepth.models.embedding_net import EmbeddingNet
from logdepth.models.language_model import LanguageModel, Size
from logdepth.models.packing import check_tokens
from logdepth.operators import OPERATORS, GRCConfig, OperatorConfig, PostMergeConfig
from logdepth.operators.initialisation import scaled_linear
from logdepth.ranges import check_dropouts
from logdepth.scanning import LengthsLike, Operator, OperatorPair, OwnSweep, ScanState, scan
from logdepth.shapes import Batch, Packed, Tokens

if TYPE_CHECKING:
    from logdepth.models.fused_scan_lm import FusedScanLM

EMBEDDING_DEVIATION = 0.02
WITHOUT_WEIGHTS = {"affine"}
"""Operators that check the scan and are no cell to learn with."""
PrefixesOf = Callable[[Operator | OperatorPair, Batch], Batch]
"""Leaves to the states of their prefixes, by an operator: the scan, or something in its place."""


@dataclass(frozen=True, kw_only=True)
class ScanLMConfig:
    """The paper's model; the width D of its states is that of the operator."""

    embed_width: int = 256
    """E, the width of the token embedding."""
    operator: OperatorConfig = field(default_factory=lambda: GRCConfig(width=256))
    """The operator ⊙."""
    depth: int = 1
    """Layers, each a whole model of the paper between embedding and head."""
    embedding_net: bool = True
    """Whether the post-embedding net stands before the scan."""
    post_merge: Literal["none", "up", "every"] = "up"
    """Where LN(x + fc(x)) follows a merge: the paper's text says every merge, its code the up-sweep's."""
    leaf_norm: bool = True
    """Whether leaves are h + dropout(LN(h)) rather than h."""
    input_residual: float = 0.1
    """How much of a layer's input is added to its output."""
    tied: bool = True
    """Whether the head is the embedding."""
    embed_dropout: float = 0.0
    """On the token embeddings."""
    leaf_dropout: float = 0.0
    """On LN(h) of the leaves."""
    post_merge_dropout: float = 0.0
    """On what the post-merge net adds."""
    output_dropout: float = 0.0
    """On what the head reads."""
    recompute: bool = False
    """Recompute merges in the backward pass instead of storing them: less memory, more time."""

    def __post_init__(self) -> None:
        if min(self.embed_width, self.depth, self.operator.width) < 1:
            raise ValueError("embed_width, depth and operator.width must be at least 1")
        if self.embedding_net and self.operator.width % 2:
            raise ValueError(
                f"the post-embedding net halves operator.width, which must be even; got {self.operator.width}"
            )
        check_dropouts(self)

    @property
    def width(self) -> int:
        return self.operator.width

    def build(self, vocab_size: int) -> "ScanLM":
        return ScanLM(self, vocab_size)

    @classmethod
    def rows(cls, size: Size) -> dict[str, "ScanLMConfig"]:
        """`ar-grc`, `ar-mlp-ldru`, and so for every operator."""
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


class ScanLMState(NamedTuple):
    """Where a batch of streams stands: one scan state a layer, O(log n) each."""

    layers: tuple[ScanState, ...]

    @property
    def lengths(self) -> Tensor:
        """Tokens absorbed so far by each row: int64, on the CPU."""
        return self.layers[0].lengths

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    def select(self, rows: Sequence[int] | Tensor) -> "ScanLMState":
        """The given rows, in the given order; a row may come twice or not at all."""
        return ScanLMState(tuple(layer.select(rows) for layer in self.layers))

    def detach(self) -> "ScanLMState":
        return ScanLMState(tuple(layer.detach() for layer in self.layers))


class ScanLM(LanguageModel):
    """The language model; its state is O(log n)."""

    def __init__(self, config: ScanLMConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.embedding = nn.Embedding(vocab_size, config.embed_width)
        nn.init.normal_(self.embedding.weight, std=EMBEDDING_DEVIATION)
        self.embed_dropout = nn.Dropout(config.embed_dropout)
        layers = [ScanLayer(config) for _ in range(config.depth)]
        self.layers = cast(Sequence[ScanLayer], nn.ModuleList(layers))
        self.output_dropout = nn.Dropout(config.output_dropout)
        self.head = None if config.tied else nn.Linear(config.embed_width, vocab_size, bias=False)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=EMBEDDING_DEVIATION)
        self.fused: FusedScanLM | None = None
        """Computes in the layers' stead, where the model is accelerated."""

    def accelerate(self) -> str | None:
        self.fused = None
        reason = self._why_not_fused()
        if reason is None:
            from logdepth.models.fused_scan_lm import FusedScanLM

            self.fused = FusedScanLM()
        return reason

    def _why_not_fused(self) -> str | None:
        from logdepth.fused import why_changed, why_not_fused

        for layer in self.layers:
            if reason := why_not_fused(layer.operators(), self.embedding.weight):
                return reason
        operator = dataclasses.replace(cast(Any, self.config.operator), width=2)
        small = dataclasses.replace(self.config, embed_width=2, operator=operator)
        return why_changed(self, lambda: ScanLM(small, 1))

    def weights_held(self) -> AbstractContextManager[None]:
        return nullcontext() if self.fused is None else self.fused.weights_held()

    def forward(
        self, tokens: Tokens, *, lengths: LengthsLike | None = None, cu_seqlens: LengthsLike | None = None
    ) -> Tensor:
        return self._logits(self._features(tokens, lengths, cu_seqlens))

    def loss(self, tokens: Tokens, targets: Tokens, *, cu_seqlens: LengthsLike | None = None) -> Tensor:
        features = self._features(tokens, None, cu_seqlens)
        return linear_cross_entropy(features.flatten(0, -2), self._head_weight, targets.flatten())

    def init_state(self, batch: int) -> ScanLMState:
        weight = self.embedding.weight
        empty = ScanState.empty(batch, self.config.width, dtype=weight.dtype, device=weight.device)
        return ScanLMState((empty,) * len(self.layers))

    def step(
        self, tokens: Tokens, state: ScanLMState, *, lengths: LengthsLike | None = None
    ) -> tuple[Tensor, ScanLMState]:
        check_tokens(tokens, packed=False)
        features, layers = self._run(tokens, state.layers, lengths, None)
        return self._logits(features), ScanLMState(layers)

    def _features(self, tokens: Tokens, lengths: LengthsLike | None, cu_seqlens: LengthsLike | None) -> Tensor:
        check_tokens(tokens, packed=cu_seqlens is not None)
        return self._run(tokens, (None,) * len(self.layers), lengths, cu_seqlens)[0]

    def _run(
        self,
        tokens: Tokens,
        states: Sequence[ScanState | None],
        lengths: LengthsLike | None,
        cu_seqlens: LengthsLike | None,
    ) -> tuple[Tensor, tuple[ScanState, ...]]:
        after: list[ScanState] = []

        def prefixes_of(operator: Operator | OperatorPair | OwnSweep, leaves: Batch) -> Batch:
            before = states[len(after)]
            if before is not None:
                leaves = leaves.to(before.dtype)
            prefixes, state = scan(
                operator,
                leaves,
                before,
                lengths=lengths,
                cu_seqlens=cu_seqlens,
                checkpoint=self.config.recompute and torch.is_grad_enabled(),
            )
            after.append(state)
            return prefixes

        if self.fused is not None:
            with launched_where(tokens):
                return self.fused.features(self, tokens, prefixes_of), tuple(after)
        return self._features_with(tokens, prefixes_of), tuple(after)

    def with_prefixes(self, tokens: Tokens, prefixes_of: PrefixesOf) -> Tensor:
        """Logits where `prefixes_of` makes the states of all prefixes, layer by layer: the scan, or another tree."""
        return self._logits(self._features_with(tokens, prefixes_of))

    def _features_with(self, tokens: Tokens, prefixes_of: PrefixesOf) -> Tensor:
        """What the head reads."""
        features = self.embed_dropout(self.embedding(tokens))
        for number, layer in enumerate(self.layers):
            output = layer.output(prefixes_of(layer.operators(), layer.leaves(features)), features)
            features = features + output if number else output
        read: Tensor = self.output_dropout(features)
        return read

    @property
    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def _logits(self, features: Tensor) -> Tensor:
        return F.linear(features, self._head_weight)


class ScanLayer(nn.Module):
    """Embeddings to leaves, a scan, and back to the embedding's width."""

    def __init__(self, config: ScanLMConfig) -> None:
        super().__init__()
        width = config.width
        self.norm = nn.LayerNorm(config.embed_width)
        self.into_state = scaled_linear(config.embed_width, width)
        self.embedding_net = EmbeddingNet(width) if config.embedding_net else nn.Identity()
        self.leaf_norm = nn.LayerNorm(width) if config.leaf_norm else None
        self.leaf_dropout = nn.Dropout(config.leaf_dropout)
        operator: nn.Module = config.operator.build()
        if config.post_merge != "none":
            operator = PostMergeConfig(width=width, dropout=config.post_merge_dropout).build(operator)
        self.operator = operator
        self.post_merge_in_up_sweep_only = config.post_merge == "up"
        self.width = width
        self.out_of_state = scaled_linear(width, config.embed_width)
        self.input_residual = config.input_residual

    def leaves(self, features: Batch | Packed) -> Tensor:
        """What the scan starts from."""
        hidden = self.embedding_net(self.into_state(self.norm(features)))
        leaves: Tensor = hidden if self.leaf_norm is None else hidden + self.leaf_dropout(self.leaf_norm(hidden))
        return leaves.to(self.into_state.weight.dtype)  # autocast must not decide what states are

    def output(self, prefixes: Tensor, features: Tensor) -> Tensor:
        return torch.add(self.out_of_state(prefixes), features, alpha=self.input_residual)

    def operators(self) -> Operator | OperatorPair:
        """What the scan is given: one operator, or one for each sweep."""
        if self.post_merge_in_up_sweep_only:
            return self.operator, self.operator.operator  # type: ignore[return-value]
        return self.operator
