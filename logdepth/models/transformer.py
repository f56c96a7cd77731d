"""The Transformer that the paper compares with: pre-norm, GELU, ALiBi or sinusoidal positions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logdepth.losses import linear_cross_entropy
from logdepth.models.attention import (
    AttentionName,
    alibi_slopes,
    backend_in_words,
    causal_attention,
    chosen_backend,
    continued_attention,
    sinusoids,
)
from logdepth.models.language_model import LanguageModel, Size
from logdepth.models.packing import check_tokens, unpack
from logdepth.ranges import check_dropouts
from logdepth.scanning import LengthsLike
from logdepth.scanning.integers import integers
from logdepth.shapes import Tokens

WEIGHT_DEVIATION = 0.02


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    """A pre-norm Transformer with GELU and hidden layers of four times its width."""

    embed_width: int = 256
    """E, the width of embedding and residual stream."""
    num_layers: int = 4
    """Blocks of attention and MLP."""
    num_heads: int = 8
    """Attention heads; they share the width evenly."""
    positions: Literal["alibi", "sinusoidal"] = "alibi"
    """How the order of tokens enters: a bias on attention by distance, or sinusoids on the embedding."""
    tied: bool = True
    """Whether the head is the embedding."""
    dropout: float = 0.0
    """On the embedding and on what each attention and each MLP adds."""
    attention: AttentionName = "auto"
    """Backend; auto: FlexAttention for ALiBi on CUDA, SDPA otherwise."""

    def __post_init__(self) -> None:
        if min(self.embed_width, self.num_layers, self.num_heads) < 1:
            raise ValueError("embed_width, num_layers and num_heads must be at least 1")
        if self.embed_width % self.num_heads:
            raise ValueError(f"embed_width {self.embed_width} does not divide into {self.num_heads} heads")
        check_dropouts(self)

    def build(self, vocab_size: int) -> "Transformer":
        return Transformer(self, vocab_size)

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


class KeyValueState(NamedTuple):
    """Where a batch of streams stands: every key and value so far, O(n). Rows may stand at different lengths."""

    keys: tuple[Tensor, ...]
    """One `[batch, heads, longest, head_width]` a layer; beyond a row's length there is garbage that nothing reads."""
    values: tuple[Tensor, ...]
    lengths: Tensor
    """Tokens absorbed so far by each row: int64, on the CPU."""

    @property
    def nbytes(self) -> int:
        return sum(one.untyped_storage().nbytes() for one in (*self.keys, *self.values))

    def select(self, rows: Sequence[int] | Tensor) -> "KeyValueState":
        """The given rows, in the given order; a row may come twice or not at all."""
        chosen = torch.as_tensor(rows, dtype=torch.int64).cpu()
        index, lengths = chosen.to(self.keys[0].device), self.lengths[chosen]
        return KeyValueState(
            tuple(keys.index_select(0, index) for keys in self.keys),
            tuple(values.index_select(0, index) for values in self.values),
            lengths,
        ).cut()

    def cut(self) -> "KeyValueState":
        """Without the columns that no row has: the caches are as long as the longest row."""
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        return KeyValueState(
            tuple(keys[:, :, :longest] for keys in self.keys),
            tuple(values[:, :, :longest] for values in self.values),
            self.lengths,
        )

    def detach(self) -> "KeyValueState":
        return KeyValueState(
            tuple(keys.detach() for keys in self.keys), tuple(values.detach() for values in self.values), self.lengths
        )


class Transformer(LanguageModel):
    """The baseline; its state grows with every token."""

    slopes: Tensor | None

    def __init__(self, config: TransformerConfig, vocab_size: int) -> None:
        super().__init__()
        self.config = config
        self.vocab_size = vocab_size
        self.embedding = nn.Embedding(vocab_size, config.embed_width)
        self.embed_dropout = nn.Dropout(config.dropout)
        blocks = [Block(config) for _ in range(config.num_layers)]
        self.blocks = cast(Sequence[Block], nn.ModuleList(blocks))
        self.norm = nn.LayerNorm(config.embed_width)
        self.head = None if config.tied else nn.Linear(config.embed_width, vocab_size, bias=False)
        self.apply(_initialise)
        for block in self.blocks:
            for last in (block.attention.out, block.mlp_out):
                nn.init.normal_(last.weight, std=WEIGHT_DEVIATION / math.sqrt(2 * config.num_layers))
        slopes = alibi_slopes(config.num_heads) if config.positions == "alibi" else None
        self.register_buffer("slopes", slopes)

    def forward(
        self, tokens: Tokens, *, lengths: LengthsLike | None = None, cu_seqlens: LengthsLike | None = None
    ) -> Tensor:
        del lengths  # in a causal model padding on the right reaches nothing
        return self._logits(self._features(tokens, cu_seqlens))

    def loss(self, tokens: Tokens, targets: Tokens, *, cu_seqlens: LengthsLike | None = None) -> Tensor:
        features = self.norm(self._features(tokens, cu_seqlens))
        return linear_cross_entropy(features.flatten(0, -2), self._head_weight, targets.flatten())

    def _features(self, tokens: Tokens, cu_seqlens: LengthsLike | None) -> Tensor:
        """What the head reads, before its norm."""
        check_tokens(tokens, packed=cu_seqlens is not None)
        if cu_seqlens is not None:
            rows, index = unpack(tokens, cu_seqlens)  # packed documents are computed padded
            return self._features(rows, None).flatten(0, 1).index_select(0, index)
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        features = self._embed(tokens, positions)
        backend = chosen_backend(self.config.attention, alibi=self.slopes is not None, device=tokens.device)
        for block in self.blocks:
            queries, keys, values = block.attention.project(block.attention_norm(features))
            attended = causal_attention(queries, keys, values, self.slopes, backend)
            features = block.after_attention(features, attended)
        return features

    def init_state(self, batch: int) -> KeyValueState:
        width = self.config.embed_width
        nothing = self.embedding.weight.new_zeros(batch, self.config.num_heads, 0, width // self.config.num_heads)
        empty = (nothing,) * self.config.num_layers
        return KeyValueState(empty, empty, torch.zeros(batch, dtype=torch.int64))

    def step(
        self, tokens: Tokens, state: KeyValueState, *, lengths: LengthsLike | None = None
    ) -> tuple[Tensor, KeyValueState]:
        check_tokens(tokens, packed=False)
        batch, length = tokens.shape
        if batch != len(state.lengths):
            raise ValueError(f"tokens have {batch} rows, but the state has {len(state.lengths)}")
        together = batch > 0 and bool((state.lengths == state.lengths[:1]).all())
        starts = state.lengths[:1] if together else state.lengths[:, None]
        positions = (starts + torch.arange(length)).to(tokens.device)
        features = self._embed(tokens, positions)
        all_keys, all_values = [], []
        for block, old_keys, old_values in zip(self.blocks, state.keys, state.values, strict=True):
            queries, keys, values = block.attention.project(block.attention_norm(features))
            keys, values = _appended(old_keys, keys, positions), _appended(old_values, values, positions)
            attended = continued_attention(queries, keys, values, self.slopes, positions)
            features = block.after_attention(features, attended)
            all_keys.append(keys)
            all_values.append(values)
        new = torch.full((batch,), length) if lengths is None else torch.from_numpy(integers("lengths", lengths))
        if new.shape != (batch,) or (new < 0).any() or (new > length).any():
            raise ValueError(f"lengths must be {batch} numbers from 0 to {length}; got {new.tolist()[:8]}")
        after = KeyValueState(tuple(all_keys), tuple(all_values), state.lengths + new)
        return self._logits(features), after.cut() if lengths is not None else after

    def attention_in_words(self) -> str:
        weight = self.embedding.weight
        dtype = torch.get_autocast_dtype(weight.device.type) if torch.is_autocast_enabled(weight.device.type) else None
        heads = self.config.num_heads
        queries = weight.new_zeros(1, heads, 128, self.config.embed_width // heads, dtype=dtype)
        alibi = self.slopes is not None
        backend = chosen_backend(self.config.attention, alibi=alibi, device=weight.device)
        return backend_in_words(backend, alibi=alibi, queries=queries)

    def _embed(self, tokens: Tokens, positions: Tensor) -> Tensor:
        features = self.embedding(tokens) * math.sqrt(self.config.embed_width)
        if self.config.positions == "sinusoidal":
            features = features + sinusoids(positions, self.config.embed_width).to(features.dtype)
        embedded: Tensor = self.embed_dropout(features)
        return embedded

    @property
    def _head_weight(self) -> Tensor:
        return self.embedding.weight if self.head is None else self.head.weight

    def _logits(self, features: Tensor) -> Tensor:
        return F.linear(self.norm(features), self._head_weight)


class Block(nn.Module):
    """Attention and MLP, each after a norm and around a residual."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        width = config.embed_width
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, config.num_heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_hidden = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(config.dropout)

    def after_attention(self, features: Tensor, attended: Tensor) -> Tensor:
        features = features + self.dropout(self.attention.merge_heads(attended))
        hidden = F.gelu(self.mlp_hidden(self.mlp_norm(features)))
        added: Tensor = self.dropout(self.mlp_out(hidden))
        return features + added


class Attention(nn.Module):
    """The projections into heads and out of them."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.into_heads = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def project(self, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, `[batch, heads, length, head_width]` each."""
        queries, keys, values = self.into_heads(features).unflatten(-1, (3, self.num_heads, -1)).unbind(-3)
        return queries.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)

    def merge_heads(self, attended: Tensor) -> Tensor:
        merged: Tensor = self.out(attended.transpose(1, 2).flatten(-2))
        return merged


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=WEIGHT_DEVIATION)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _appended(old: Tensor, new: Tensor, positions: Tensor) -> Tensor:
    """The cache with new entries at the given positions; the old cache stays as it was."""
    cache = torch.cat([old.to(new.dtype), new], dim=2)
    if positions.ndim == 1:
        return cache
    index = positions[:, None, :, None].expand_as(new)
    return cache.scatter(2, index, new)
