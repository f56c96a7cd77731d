"""Attention block: x + dropout(W_out · attention(norm(x))), full or in a sliding window."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logdepth.blocks.block import Block
from logdepth.blocks.layout import Layout
from logdepth.ops import Linear, NormName, norm_named
from logdepth.ops.attention import (
    AttentionBackend,
    alibi_slopes,
    attention,
    backend_in_words,
    chosen_backend,
    rotated,
    whole_attention,
)
from logdepth.ranges import check_dropouts
from logdepth.scanning.device_index import index_on
from logdepth.scanning.lengths import Ints

SMALLEST_CACHE = 64
"""Positions for which a static cache of keys and values has room at least; it grows by doubling."""


@dataclass(frozen=True, kw_only=True)
class AttentionConfig:
    """Causal self-attention."""

    heads: int = 8
    """Number of attention heads, which share the model's width evenly."""
    positions: Literal["none", "alibi", "rope"] = "rope"
    """How attention sees the order of tokens: not at all, by ALiBi, or by rotary embeddings (RoPE)."""
    window: int | None = None
    """Number of positions that a token reads, its own included; by default all of them."""
    qk_norm: bool = False
    """Whether queries and keys are RMS-normalised per head."""
    norm: NormName = "rms"
    """Norm before the block: layer or rms."""
    bias: bool = False
    """Whether the linear maps have biases."""
    dropout: float = 0.0
    """Dropout on what the block adds to the residual stream."""
    backend: AttentionBackend = "auto"
    """What computes whole sequences; auto: FlexAttention for ALiBi and windows on CUDA, SDPA otherwise."""

    def __post_init__(self) -> None:
        if self.heads < 1 or (self.window is not None and self.window < 1):
            raise ValueError(f"heads and window must be at least 1; got {self.heads} and {self.window}")
        check_dropouts(self)

    def build(self, dim: int) -> "AttentionBlock":
        return AttentionBlock(dim, self)


class KeyValueState(NamedTuple):
    """The keys and values of the tokens before. Rows may have different lengths."""

    keys: Tensor
    """`[batch, heads, columns, head_width]`."""
    values: Tensor
    positions: Tensor
    """The position of each column, `[batch, columns]`, rising; first −1 in columns that a shorter row does not have."""

    @property
    def nbytes(self) -> int:
        return self.keys.untyped_storage().nbytes() + self.values.untyped_storage().nbytes()

    def select(self, rows: Sequence[int] | Tensor) -> "KeyValueState":
        index = torch.as_tensor(rows, dtype=torch.int64).to(self.keys.device)
        return KeyValueState(*(one.index_select(0, index) for one in self))

    @classmethod
    def concatenate(cls, states: Sequence["KeyValueState"]) -> "KeyValueState":
        columns = max(one.keys.shape[2] for one in states)
        return cls(*(torch.cat(alike) for alike in zip(*(one._widened(columns) for one in states), strict=True)))

    def detach(self) -> "KeyValueState":
        return KeyValueState(self.keys.detach(), self.values.detach(), self.positions)

    def _widened(self, columns: int) -> "KeyValueState":
        """With empty columns before the others, so that there are as many."""
        missing = columns - self.keys.shape[2]
        if not missing:
            return self
        keys, values = (F.pad(one, (0, 0, missing, 0)) for one in self[:2])
        return KeyValueState(keys, values, F.pad(self.positions, (missing, 0), value=-1))


class AttentionBlock(Block):
    """Pre-norm causal self-attention; its state grows with every token, up to the window."""

    slopes: Tensor | None

    def __init__(self, dim: int, config: AttentionConfig) -> None:
        super().__init__()
        if dim % config.heads:
            raise ValueError(f"dim {dim} does not divide into {config.heads} heads")
        if config.positions == "rope" and dim // config.heads % 2:
            raise ValueError(
                f"RoPE needs heads of an even width; dim {dim} has {config.heads} of {dim // config.heads}"
            )
        self.config, self.dim = config, dim
        self.norm = norm_named(config.norm, dim)
        self.into_heads = Linear(dim, 3 * dim, bias=config.bias)
        self.out = Linear(dim, dim, bias=config.bias)
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.query_norm = norm_named("rms", dim // config.heads)
            self.key_norm = norm_named("rms", dim // config.heads)
        self.dropout = nn.Dropout(config.dropout)
        slopes = alibi_slopes(config.heads) if config.positions == "alibi" else None
        self.register_buffer("slopes", slopes, persistent=False)

    def forward(
        self, x: Tensor, state: "KeyValueState | StaticKeyValues | None", layout: Layout
    ) -> tuple[Tensor, "KeyValueState | StaticKeyValues"]:
        config = self.config
        queries, keys, values = self.project(layout.to_rows(x))
        positions = layout.row_positions(x.device)
        if config.positions == "rope":
            queries, keys = rotated(queries, positions), rotated(keys, positions)
        new_state: KeyValueState | StaticKeyValues
        if isinstance(state, StaticKeyValues):
            state.put(keys, values, positions)
            attended, new_state = self._continued(queries, state.cached, positions), state
        else:
            cached = _appended(state, keys, values, positions, layout)
            if layout.fresh:
                attended = whole_attention(
                    queries, keys, values, slopes=self.slopes, window=config.window, backend=self._backend(x.device)
                )
            else:
                attended = self._continued(queries, cached, positions)
            new_state = cached if state is None else _kept(state, cached, layout, config.window)
        merged = layout.from_rows(attended.transpose(1, 2).flatten(-2))
        return x + self.dropout(self.out(merged)), new_state

    def init_state(self, batch: int) -> KeyValueState:
        weight = self.out.weight
        nothing = weight.new_zeros(batch, self.config.heads, 0, self.dim // self.config.heads)
        return KeyValueState(nothing, nothing, torch.zeros(batch, 0, dtype=torch.int64, device=weight.device))

    def static_state(self, state: KeyValueState) -> "StaticKeyValues":
        return StaticKeyValues(state, self.config.window)

    def reset_buffers(self) -> None:
        if self.slopes is not None:
            self.slopes.copy_(alibi_slopes(self.config.heads))

    def residual_outputs(self) -> Sequence[nn.Linear]:
        return (self.out,)

    def refuse_training_on(self, device: torch.device) -> None:
        if self._backend(device) == "flex" and device.type == "cpu":
            raise ValueError("FlexAttention has no gradients on a CPU: choose another attention backend, such as auto")

    def attention_in_words(self, dtype: torch.dtype | None) -> str:
        """What computes attention of a whole sequence on this device and in this dtype."""
        weight, heads = self.out.weight, self.config.heads
        queries = weight.new_zeros(1, heads, 128, self.dim // heads, dtype=dtype)
        alibi = self.slopes is not None
        return backend_in_words(self._backend(weight.device), slopes=alibi, window=self.config.window, queries=queries)

    def project(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, `[rows, heads, length, head_width]` each."""
        projected = self.into_heads(self.norm(rows)).unflatten(-1, (3, self.config.heads, -1))
        queries, keys, values = (one.transpose(1, 2) for one in projected.unbind(-3))
        if self.qk_norm:
            queries, keys = self.query_norm(queries), self.key_norm(keys)
        return queries, keys, values

    def _continued(self, queries: Tensor, cached: KeyValueState, positions: Tensor) -> Tensor:
        """Attention of queries at the given positions to everything cached."""
        return attention(
            queries,
            cached.keys.to(queries.dtype),
            cached.values.to(queries.dtype),
            positions,
            cached.positions,
            slopes=self.slopes,
            window=self.config.window,
            backend="plain" if self.config.backend == "plain" else "sdpa",
        )

    def _backend(self, device: torch.device) -> str:
        masked = self.slopes is not None or self.config.window is not None
        head_width = self.dim // self.config.heads
        return chosen_backend(self.config.backend, masked=masked, head_width=head_width, device=device)


def _appended(
    state: KeyValueState | None, keys: Tensor, values: Tensor, positions: Tensor, layout: Layout
) -> KeyValueState:
    """The cache with new columns; the old cache stays as it was. Padding gets no position."""
    batch = keys.shape[0]
    positions = positions.expand(batch, keys.shape[2])
    if layout.lengths is not None or layout.packed:
        valid = torch.arange(keys.shape[2]) < torch.from_numpy(layout.new)[:, None]
        positions = positions.where(valid.to(positions.device), -1)
    if state is None or not state.keys.shape[2]:
        return KeyValueState(keys, values, positions)
    return KeyValueState(
        torch.cat([state.keys.to(keys.dtype), keys], dim=2),
        torch.cat([state.values.to(values.dtype), values], dim=2),
        torch.cat([state.positions, positions], dim=1),
    )


def _kept(before: KeyValueState, cached: KeyValueState, layout: Layout, window: int | None) -> KeyValueState:
    """Without columns that no later token reads, in the order of positions and in storage that holds nothing else."""
    total, longest = cached.keys.shape[2], int(layout.lengths_after.max(initial=0))
    columns = min(total, longest if window is None else min(longest, window - 1))
    if layout.lengths is not None or layout.packed:
        return _latest(cached, columns)
    if columns == total and before.keys.shape[2]:
        return cached  # a concatenation already
    start = total - columns
    return KeyValueState(
        cached.keys[:, :, start:].clone(), cached.values[:, :, start:].clone(), cached.positions[:, start:]
    )


def _latest(cached: KeyValueState, columns: int) -> KeyValueState:
    """The columns with the highest positions of each row, in the order of their positions."""
    order = cached.positions.sort(dim=1, stable=True).indices[:, cached.keys.shape[2] - columns :]
    index = order[:, None, :, None].expand(-1, cached.keys.shape[1], -1, cached.keys.shape[3])
    return KeyValueState(
        cached.keys.gather(2, index), cached.values.gather(2, index), cached.positions.gather(1, order)
    )


class StaticKeyValues:
    """Keys and values in memory of fixed size, changed in place. With a window, a new token overwrites the oldest."""

    steps_differ = False

    def __init__(self, state: KeyValueState, window: int | None) -> None:
        self.window = window
        self.positions = state.positions.new_full((len(state.keys), 0), -1)
        self.keys = self.values = state.keys[:, :, :0].clone()
        self._resize(window or max(SMALLEST_CACHE, _power_of_two(state.keys.shape[2] + 1)), state)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @property
    def cached(self) -> KeyValueState:
        """The memory itself."""
        return KeyValueState(self.keys, self.values, self.positions)

    @property
    def capacity(self) -> int:
        return self.keys.shape[2] if self.window is None else 2**62

    def make_room(self, longest: int) -> None:
        if longest > self.capacity:
            self._resize(_power_of_two(longest), self.cached)

    def put(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """One token of every row, at its position in the row."""
        batch, capacity = self.positions.shape
        positions = positions.expand(batch, 1)
        place = positions % capacity
        index = place[:, None, :, None].expand_as(keys)
        self.keys.scatter_(2, index, keys.to(self.keys.dtype))
        self.values.scatter_(2, index, values.to(self.values.dtype))
        self.positions.scatter_(1, place, positions)

    def update(self, state: "StaticKeyValues") -> None:
        assert state is self

    def replace(self, rows: Ints, state: KeyValueState) -> None:
        index = index_on(self.keys.device, rows)
        placed = _placed(state, self.keys.shape[2])
        for mine, new in zip((self.keys, self.values, self.positions), placed, strict=True):
            mine.index_copy_(0, index, new.to(mine.dtype))

    def state(self, lengths: Ints, rows: Ints) -> KeyValueState:
        longest = int(lengths[rows].max(initial=0))
        columns = longest if self.window is None else min(longest, self.window - 1)
        whole = self.cached.select(torch.from_numpy(rows))
        return _latest(whole, columns)

    def exported(self, longest: int) -> dict[str, Tensor]:
        columns = longest if self.window is None else self.window
        return (self.cached if self.keys.shape[2] == columns else _placed(self.cached, columns))._asdict()

    def on(self, exported: Mapping[str, Tensor]) -> "StaticKeyValues":
        state = copy.copy(self)
        state.keys, state.values, state.positions = (exported[name].clone() for name in KeyValueState._fields)
        return state

    def _resize(self, capacity: int, state: KeyValueState) -> None:
        self.keys, self.values, self.positions = _placed(state, capacity)


def _placed(state: KeyValueState, capacity: int) -> KeyValueState:
    """Keys and values in `capacity` columns, each where its position modulo the capacity says."""
    batch, heads, columns, width = state.keys.shape
    keys, values = (one.new_zeros(batch, heads, capacity + 1, width) for one in state[:2])
    positions = state.positions.new_full((batch, capacity + 1), -1)
    if columns:
        # Columns without a position, and those out of a window, go to one that is cut off.
        last = state.positions.amax(dim=1, keepdim=True)
        there = (state.positions >= 0) & (state.positions > last - capacity)
        place = torch.where(there, state.positions % capacity, capacity)
        index = place[:, None, :, None].expand_as(state.keys)
        keys.scatter_(2, index, state.keys)
        values.scatter_(2, index, state.values)
        positions.scatter_(1, place, state.positions)
    keys, values = keys[:, :, :capacity].contiguous(), values[:, :, :capacity].contiguous()
    return KeyValueState(keys, values, positions[:, :capacity].contiguous())


def _power_of_two(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()
