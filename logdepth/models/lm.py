"""LM: an embedding, a tuple of blocks from the config, and a head. Every call goes through one forward pass, `run`."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logdepth.blocks import AttentionBlock, AttentionConfig, Block, BlockConfig, Layout, MLPConfig, ScanConfig
from logdepth.blocks.spec import block_config
from logdepth.models.language_model import LanguageModel, Size
from logdepth.ops import (
    Casts,
    FrozenTable,
    TokenLookup,
    linear,
    linear_cross_entropy,
    norm_named,
    product_dtype,
    use_kernels,
    using_casts,
)
from logdepth.ops import token_losses as losses_of_tokens
from logdepth.ops.attention import sinusoids
from logdepth.ops.dispatch import is_intercepted, is_unmodified, on_device_of
from logdepth.ops.dropout import rate_of
from logdepth.ops.precision import has_casts
from logdepth.ranges import check_dropouts, check_layers
from logdepth.scanning import LengthsLike
from logdepth.shapes import Tokens

DEVIATION = 0.02
"""Standard deviation of normal initial weights."""


@dataclass(frozen=True, kw_only=True)
class LMConfig:
    """A language model from any blocks. The defaults are a hybrid of a scan, window attention and an MLP."""

    dim: int = 512
    """Width of the embedding and of the residual stream."""
    blocks: tuple[BlockConfig | str, ...] = field(
        default_factory=lambda: (ScanConfig(), AttentionConfig(window=128), MLPConfig())
    )
    """Blocks between embedding and head, each name or name:field=value,…; for example scan attention:window=128 mlp."""
    repeats: int = 1
    """How many times the sequence of blocks is repeated."""
    positions: Literal["none", "sinusoidal"] = "none"
    """What is added to the embedding to mark the order of tokens; attention blocks have positions of their own."""
    scale_embedding: bool = False
    """Whether the embedding is multiplied by the square root of dim."""
    norm: Literal["none", "layer", "rms"] = "rms"
    """Norm before the head."""
    tied: bool = True
    """Whether the head is the embedding."""
    embed_dropout: float = 0.0
    """Dropout on the token embeddings."""
    output_dropout: float = 0.0
    """Dropout on what the head reads."""
    initialisation: Literal["zero-output", "gpt2", "paper"] = "zero-output"
    """Initial weights: normal with block outputs at zero, as in GPT-2, or each block's own (the paper's layers)."""

    def __post_init__(self) -> None:
        if isinstance(self.blocks, str):
            raise ValueError(f"blocks must be a tuple of blocks; write ('{self.blocks}',)")
        if self.dim < 1 or not self.blocks:
            raise ValueError("dim must be at least 1, and there must be a block")
        check_layers("repeats", self.repeats)
        check_layers("the number of blocks", len(self.blocks))
        blocks = tuple(block_config(one) if isinstance(one, str) else one for one in self.blocks)
        object.__setattr__(self, "blocks", blocks)  # the only way in a frozen dataclass
        check_dropouts(self)

    def build(self, vocab_size: int) -> "LM":
        return LM(vocab_size, self)

    @classmethod
    def rows(cls, size: Size) -> dict[str, "LMConfig"]:
        """None: a hybrid is a row of no table of the paper."""
        del size
        return {}


class LMState(NamedTuple):
    """The state of a batch: that of every block, and the number of tokens absorbed. Never changed in place."""

    blocks: tuple[Any, ...]
    lengths: Tensor
    """Tokens absorbed so far by each row: int64, on the CPU."""

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.blocks if one is not None)

    def select(self, rows: Sequence[int] | Tensor) -> "LMState":
        """The given rows, in the given order; a row may be repeated or left out."""
        chosen = torch.arange(len(self.lengths))[torch.as_tensor(rows, dtype=torch.int64).cpu()]  # −1 is the last
        blocks = tuple(None if one is None else one.select(chosen) for one in self.blocks)
        return LMState(blocks, self.lengths[chosen])

    @classmethod
    def concatenate(cls, states: Sequence["LMState"]) -> "LMState":
        """One state with the rows of all `states`, at least one, in order."""
        if not states:
            raise ValueError("concatenate needs at least one state")
        blocks = tuple(
            None if alike[0] is None else type(alike[0]).concatenate(alike)
            for alike in zip(*(one.blocks for one in states), strict=True)
        )
        return cls(blocks, torch.cat([one.lengths for one in states]))

    def detach(self) -> "LMState":
        """The same state, cut from the graph."""
        return LMState(tuple(None if one is None else one.detach() for one in self.blocks), self.lengths)


class LM(LanguageModel):
    """A causal language model: `LM(vocab_size, dim=512, blocks=("scan", "attention:window=128", "mlp"))`."""

    call_block: Callable[..., tuple[Tensor, Any]] | None = None
    """Called in training instead of each block, with the block first; for example torch.utils.checkpoint.checkpoint."""

    def __init__(self, vocab_size: int, config: LMConfig | None = None, **fields: Any) -> None:
        super().__init__()
        if config is not None and fields:
            raise TypeError(f"give a config or its fields, not both; got a config and {', '.join(fields)}")
        config = LMConfig(**fields) if config is None else config
        self.config, self.vocab_size = config, vocab_size
        # Modules are made, and draw their first weights, in this order: a seed gives the weights that it always gave.
        self.embedding = nn.Embedding(vocab_size, config.dim)
        if config.initialisation == "paper":
            nn.init.normal_(self.embedding.weight, std=DEVIATION)
        self.embed_dropout = nn.Dropout(config.embed_dropout)
        blocks = [cast(Any, one).build(config.dim) for _ in range(config.repeats) for one in config.blocks]
        self.blocks = cast(Sequence[Block], nn.ModuleList(blocks))
        self.norm = None if config.norm == "none" else norm_named(config.norm, config.dim)
        self.output_dropout = nn.Dropout(config.output_dropout)
        self.head = None if config.tied else nn.Linear(config.dim, vocab_size, bias=False)
        self._initialise()
        self._frozen: FrozenTable | None = None

    def forward(
        self, tokens: Tokens, *, lengths: LengthsLike | None = None, cu_seqlens: LengthsLike | None = None
    ) -> Tensor:
        return self.logits(self.features(tokens, lengths=lengths, cu_seqlens=cu_seqlens))

    def step(self, tokens: Tokens, state: LMState, *, lengths: LengthsLike | None = None) -> tuple[Tensor, LMState]:
        check_tokens(tokens, packed=False)
        if len(tokens) != len(state.lengths):
            raise ValueError(f"tokens have {len(tokens)} rows, but the state has {len(state.lengths)}")
        features, after = self.continued(tokens, state, lengths)
        return self.logits(features), after

    def loss(self, tokens: Tokens, targets: Tokens, *, cu_seqlens: LengthsLike | None = None) -> Tensor:
        return self.features_loss(self.features(tokens, cu_seqlens=cu_seqlens), targets)

    def features_loss(self, features: Tensor, targets: Tokens) -> Tensor:
        """Mean cross-entropy of the next tokens, in nats, from what the head reads."""
        if not self.head_is_a_matrix:
            return F.cross_entropy(self._exact_logits(features), targets.flatten())
        return linear_cross_entropy(features.flatten(0, -2), self.head_weight, targets.flatten())

    def token_losses(
        self, tokens: Tokens, targets: Tokens, state: LMState | None = None, *, cu_seqlens: LengthsLike | None = None
    ) -> tuple[Tensor, LMState | None]:
        if state is None:
            features, after = self.features(tokens, cu_seqlens=cu_seqlens), None
        else:
            features, after = self.continued(tokens, state)
        if not self.head_is_a_matrix:
            losses = F.cross_entropy(self._exact_logits(features), targets.flatten(), reduction="none")
            return losses.view(targets.shape), after
        losses = losses_of_tokens(features.flatten(0, -2), self.head_weight, targets.flatten())
        return losses.view(targets.shape), after

    def init_state(self, batch: int) -> LMState:
        return LMState(tuple(block.init_state(batch) for block in self.blocks), torch.zeros(batch, dtype=torch.int64))

    def features(
        self, tokens: Tokens, *, lengths: LengthsLike | None = None, cu_seqlens: LengthsLike | None = None
    ) -> Tensor:
        """What the head reads at every position, of rows that start here."""
        check_tokens(tokens, packed=cu_seqlens is not None)
        layout = Layout(tokens.shape, lengths=lengths, cu_seqlens=cu_seqlens)
        return self.run(tokens, None, layout)[0]

    def run(self, tokens: Tokens, states: Sequence[Any] | None, layout: Layout) -> tuple[Tensor, tuple[Any, ...]]:
        """The forward pass: what the head reads, and the state of every block, which are kept only if some came in."""
        after: list[Any] = []
        with on_device_of(self.embedding.weight), self._casts():
            x: Any = self._embedded(tokens, layout)
            call = self.call_block if self.training and torch.is_grad_enabled() else None
            for number, block in enumerate(self.blocks):
                before = None if states is None else states[number]
                x, state = block(x, before, layout) if call is None else call(block, x, before, layout)
                if states is not None:
                    after.append(state)
            if self.norm is not None:
                x = self.norm(x)
            features: Tensor = self.output_dropout(x)
        return features, tuple(after)

    def continued(
        self,
        tokens: Tokens,
        state: LMState,
        lengths: LengthsLike | None = None,
        cu_seqlens: LengthsLike | None = None,
    ) -> tuple[Tensor, LMState]:
        """What the head reads at every further token, of rows or packed, and the state after them."""
        layout = Layout(tokens.shape, lengths=lengths, cu_seqlens=cu_seqlens, absorbed=state.lengths.numpy())
        features, blocks = self.run(tokens, state.blocks, layout)
        return features, LMState(blocks, torch.from_numpy(layout.lengths_after))

    def logits(self, features: Tensor) -> Tensor:
        """The logits of the next token, from what the head reads."""
        if self.head_is_a_matrix:
            return linear(features, self.head_weight)
        assert self.head is not None
        return self.head(features)  # type: ignore[no-any-return]

    @property
    def head_is_a_matrix(self) -> bool:
        """Whether the head is as it is built. Otherwise it is called, as it may be another module or have hooks."""
        head = self.head
        return head is None or (type(head) is nn.Linear and head.bias is None and not is_intercepted(head))

    @property
    def head_weight(self) -> Tensor:
        """`[vocab_size, dim]`."""
        return self.embedding.weight if self.head is None else self.head.weight

    def _exact_logits(self, features: Tensor) -> Tensor:
        """All logits, `[rows, vocab_size]`, in float32 at least."""
        logits = self.logits(features).flatten(0, -2)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    @contextmanager
    def frozen_weights(self, table: FrozenTable | None = None) -> Iterator[None]:
        outer, self._frozen = self._frozen, table or self._frozen or FrozenTable()
        try:
            yield
        finally:
            self._frozen = outer

    def allocate(self, device: torch.device | str) -> None:
        super().allocate(device)
        for block in self.blocks:
            block.reset_buffers()

    def attention_in_words(self) -> str | None:
        weight = self.embedding.weight
        dtype = torch.get_autocast_dtype(weight.device.type) if torch.is_autocast_enabled(weight.device.type) else None
        words = [one.attention_in_words(dtype) for one in self.blocks if isinstance(one, AttentionBlock)]
        return "; ".join(dict.fromkeys(words)) if words else None

    def _embedded(self, tokens: Tokens, layout: Layout) -> Tensor | TokenLookup:
        config, weight = self.config, self.embedding.weight
        plain = config.positions == "none" and not config.scale_embedding and self._embeds_by_lookup()
        if plain and self.blocks[0].accepts_lookup:
            return TokenLookup(weight, tokens, self._frozen)
        x: Tensor = self.embedding(tokens)
        if config.scale_embedding:
            x = x * math.sqrt(config.dim)
        if config.positions == "sinusoidal":
            x = x + sinusoids(layout.positions(x.device), config.dim).to(x.dtype)
        embedded: Tensor = self.embed_dropout(x)
        return embedded

    def _embeds_by_lookup(self) -> bool:
        """Whether embedding and dropout are as they are built, and amount to rows of the table."""
        embedding, dropout = self.embedding, self.embed_dropout
        if not (is_unmodified(embedding, {"": nn.Embedding}) and is_unmodified(dropout, {"": nn.Dropout})):
            return False
        options = (embedding.max_norm is not None, embedding.scale_grad_by_freq, embedding.sparse)
        return embedding.padding_idx is None and not any(options) and not rate_of(dropout)

    def _casts(self) -> AbstractContextManager[None]:
        """All weights of linear maps in the dtype of products at once, where kernels will read them."""
        weight = self.embedding.weight
        if not use_kernels(weight) or has_casts(dtype := product_dtype(weight)) or dtype == weight.dtype:
            return nullcontext()
        return using_casts(Casts(self.product_weights(), dtype))

    def product_weights(self) -> Iterator[Tensor]:
        """The weights and biases of all linear maps between embedding and head."""
        blocks = cast(nn.ModuleList, self.blocks)
        linears = (one for one in blocks.modules() if isinstance(one, nn.Linear))
        return itertools.chain.from_iterable(one.parameters(recurse=False) for one in linears)

    def _initialise(self) -> None:
        config = self.config
        if config.initialisation == "paper":
            if self.head is not None:
                nn.init.normal_(self.head.weight, std=DEVIATION)
            return
        nn.init.normal_(self.embedding.weight, std=DEVIATION)
        for block in self.blocks:
            block.initialise(DEVIATION)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=DEVIATION)
        outputs = [one for block in self.blocks for one in block.residual_outputs()]
        for one in outputs:
            if config.initialisation == "gpt2":
                nn.init.normal_(one.weight, std=DEVIATION / math.sqrt(len(outputs)))
            else:
                nn.init.zeros_(one.weight)


def check_tokens(tokens: Tensor, packed: bool) -> None:
    """Refuses what is no batch of token numbers."""
    expected = "[total] with cu_seqlens" if packed else "[batch, length]"
    if tokens.ndim != (1 if packed else 2) or tokens.is_floating_point():
        raise ValueError(f"tokens must be whole numbers {expected}; got {tokens.dtype} of shape {tuple(tokens.shape)}")
