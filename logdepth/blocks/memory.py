"""MemoryLayer, a tree of keyed memories as a layer of any model, and MemoryBlock, which puts it into a residual stream.

Per head, a token writes its value v at its key k into a matrix, and erases what was there:
(M, S) = (α(I − βkkᵀ), βkvᵀ), and (M_L, S_L) ⊙ (M_R, S_R) = (M_R M_L, M_R S_L + S_R). The leaves of the tree are chunks
of tokens. A token reads its own chunk up to itself, and then the blocks of the binary decomposition of the chunks
before it, from the latest to the earliest:

    q, k, v = SiLU(conv(W h)), q and k of length 1       β = strength · σ(w_β·h)       α = exp(−softplus(w_α·h + b))
    o = q S_own + Σ_l λ_l q_l S_l,   q_l = q M_own … M of the blocks that were read before
    λ_l = softplus(u·h + (w·h) · l/2 + bias_l + softplus⁻¹(1))
    y = W_out (SiLU(W_gate h) ∘ RMSNorm(o))

With λ = 1, and always with `reading="fold"`, it is the gated delta rule, o = q S of everything before.

With a summary, a block also carries a vector s per head, and λ depends on what the block contains. Of a chunk it is the
mean of W_s h over its tokens; two blocks have the mean of theirs, or what a GRC makes of them. From both summaries,
gates can scale what a merge keeps of the earlier block (`operators/matrix_affine/summarising.py`):

    λ_l = softplus(u·h + (w·h) · l/2 + (W_p h)·s_l + bias_l + softplus⁻¹(1))
    (M_L, S_L) ⊙ (M_R, S_R) = (M_R diag(g) M_L, M_R diag(g) S_L + S_R)

`ops/delta_rule_reference.py` is the definition.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logdepth.blocks.block import Block, StaticState, StaticTensors, TensorState, part_named, with_names
from logdepth.blocks.layout import Layout, StepLayout
from logdepth.blocks.pieces import Pieces, pieces_of, prefix_index
from logdepth.blocks.short_conv import ShortConv
from logdepth.operators.matrix_affine import MatrixAffineOperator, SummarisingOperator, SummaryMerge
from logdepth.ops import (
    Linear,
    NormName,
    RMSNorm,
    delta_chunks,
    delta_step,
    norm_named,
    normalised,
    product_dtype,
    without_autocast,
)
from logdepth.ops.block_reading import BlockRead, BlockTable, level_weights, read_blocks, read_level
from logdepth.ops.precision import DotPrecision, dot_precision
from logdepth.ranges import check_dropouts
from logdepth.scanning import LengthsLike, TreeState, build_tree, scan
from logdepth.scanning.lengths import Ints
from logdepth.scanning.static_state import StaticTreeState


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """A tree of keyed memories with the gated delta rule, in a residual stream."""

    heads: int = 8
    """Number of heads, each with a memory of its own."""
    key_width: int | None = None
    """Width of a head's queries and keys; by default the model's width divided by the number of heads."""
    value_width: int | None = None
    """Width of a head's values; by default likewise."""
    chunk: int = 64
    """Tokens of a leaf of the tree, a power of two. Reading by levels, it is part of the model."""
    conv: int = 4
    """Tokens that a causal depthwise convolution of queries, keys and values reads; 0: no convolution."""
    reading: Literal["levels", "fold"] = "levels"
    """How a prefix is read: block by block with a weight for each level, or as their fold (the gated delta rule)."""
    levels: int = 3
    """Levels of the tree with weights of their own; higher ones share the last. Training on n tokens reaches
    log2(n / chunk) levels: with more than these, weights that were never trained are used at longer contexts."""
    write_strength: float = 1.0
    """The largest share β that a write replaces of what is stored at its key, up to 2 (negative eigenvalues)."""
    gate: bool = True
    """Whether the output is multiplied by SiLU(W_gate · norm(x))."""
    summary: int = 0
    """Width of a vector per head that summarises a block, so that its weight depends on what it contains; 0: none."""
    summary_merge: SummaryMerge = "mean"
    """How the summaries of two blocks become one: their mean, or a GRC."""
    merge_gate: bool = False
    """Whether merges scale what they keep of the earlier block, by a gate per key channel from both summaries."""
    norm: NormName = "rms"
    """Norm before the block: layer or rms."""
    dropout: float = 0.0
    """Dropout on what the block adds to the residual stream."""

    def __post_init__(self) -> None:
        widths = [one for one in (self.key_width, self.value_width) if one is not None]
        if min(self.heads, self.levels, *widths) < 1 or self.conv < 0:
            raise ValueError("heads, levels, key_width and value_width must be at least 1, and conv at least 0")
        if self.chunk < 1 or self.chunk & (self.chunk - 1):
            raise ValueError(f"chunk must be a power of two; got {self.chunk}")
        if self.reading not in ("levels", "fold"):
            raise ValueError(f"reading must be levels or fold; got '{self.reading}'")
        if not 0 < self.write_strength <= 2:
            raise ValueError(f"write_strength must be above 0 and at most 2; got {self.write_strength}")
        if self.summary < 0:
            raise ValueError(f"summary must be at least 0; got {self.summary}")
        if self.summary and self.reading == "fold":
            raise ValueError("a summary needs reading=levels, since the fold reads no single blocks")
        if self.summary_merge not in ("mean", "grc"):
            raise ValueError(f"summary_merge must be mean or grc; got '{self.summary_merge}'")
        if not self.summary and (self.summary_merge != "mean" or self.merge_gate):
            raise ValueError("summary_merge and merge_gate need a summary; give its width, such as summary=16")
        check_dropouts(self)

    def build(self, dim: int) -> "MemoryBlock":
        return MemoryBlock(dim, self)


class MemoryState(NamedTuple):
    """The memory of every row, read by levels: O(log n) blocks, the open chunk, and the last inputs of the convolution.

    Read as a fold, the state is a `TensorState` of fixed size instead: S, and the inputs of the convolution.
    """

    lengths: Tensor
    """Tokens absorbed by each row: int64, on the CPU."""
    tree: TreeState
    """The blocks of all complete chunks."""
    tensors: TensorState
    """[M | S] of each row's open chunk, which is [I | 0] where it has no token yet, and behind it the sum of what its
    summary will be the mean of; and the convolution's inputs."""

    @property
    def nbytes(self) -> int:
        return self.tree.nbytes + self.tensors.nbytes

    def select(self, rows: Sequence[int] | Tensor) -> "MemoryState":
        chosen = torch.arange(len(self.lengths))[torch.as_tensor(rows, dtype=torch.int64).cpu()]  # −1 is the last
        return MemoryState(self.lengths[chosen], self.tree.select(chosen), self.tensors.select(chosen))

    @classmethod
    def concatenate(cls, states: Sequence["MemoryState"]) -> "MemoryState":
        return cls(
            torch.cat([one.lengths for one in states]),
            TreeState.concatenate([one.tree for one in states]),
            TensorState.concatenate([one.tensors for one in states]),
        )

    def detach(self) -> "MemoryState":
        return MemoryState(self.lengths, self.tree.detach(), self.tensors.detach())


class StaticMemoryState(NamedTuple):
    """The same in memory of fixed size."""

    chunk: int
    tree: StaticTreeState
    tensors: StaticTensors

    @property
    def steps_differ(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        return self.tree.nbytes + self.tensors.nbytes

    @property
    def capacity(self) -> int:
        return (self.tree.capacity + 1) * self.chunk - 1

    def make_room(self, longest: int) -> None:
        self.tree.make_room(longest // self.chunk)

    def update(self, state: TensorState) -> None:
        self.tensors.update(state)  # the tree has changed already

    def replace(self, rows: Ints, state: MemoryState) -> None:
        self.tree.replace(rows, state.tree)
        self.tensors.replace(rows, state.tensors)

    def state(self, lengths: Ints, rows: Ints) -> MemoryState:
        tree = self.tree.state(lengths // self.chunk, rows)
        return MemoryState(torch.from_numpy(lengths[rows]), tree, self.tensors.state(lengths, rows))

    def exported(self, longest: int) -> dict[str, Tensor]:
        tree = self.tree.exported(longest // self.chunk)
        return with_names({"tree": tree, "tensors": self.tensors.exported(longest)})

    def on(self, exported: Mapping[str, Tensor]) -> "StaticMemoryState":
        tree, tensors = self.tree.on(part_named("tree", exported)), self.tensors.on(part_named("tensors", exported))
        return StaticMemoryState(self.chunk, tree, tensors)


class Tokens(NamedTuple):
    """What a head does with a token. All but `vectors` is in float32 at least."""

    vectors: Tensor
    """Queries, keys and values side by side, before they are normalised, `[…, heads, 2 · key_width + value_width]`."""
    log_decay: Tensor
    """`[…, heads]`; likewise `strength`."""
    strength: Tensor
    slopes: Tensor
    """u·h, w·h and W_p h of the weights λ, `[…, heads, 2 + summary]`."""
    summarised: Tensor
    """W_s h, of which a summary is the mean, `[…, heads, summary]`."""


class Reading(NamedTuple):
    """How far the tokens of all pieces have read."""

    outputs: Tensor
    """`[pieces, heads, size, value_width]`."""
    queries: Tensor
    """With what they read the next block, `[pieces, heads, size, key_width]`."""


class MemoryLayer(nn.Module):
    """A tree of keyed memories as a layer: `y = layer(x)` for `x` `[batch, length, dim]`.

    It maps a sequence to a sequence of the same shape, as attention does, and is causal. Its state is O(log n), or of
    fixed size with `reading="fold"`, which is the gated delta rule.

        layer = MemoryLayer(512, heads=8)
        y = layer(x)                              # whole sequences
        state = layer.init_state(batch)
        y, state = layer.step(x, state)           # one token or many; the state is never changed in place

    Args:
        dim: width of the input and the output.
        heads: each head has a memory of its own.
        key_width: width of a head's queries and keys; by default `dim / heads`.
        value_width: width of a head's values; by default likewise.
        chunk: tokens of a leaf of the tree, a power of two. Reading by levels, it is part of the model.
        conv: tokens that a causal depthwise convolution of queries, keys and values reads; 0: no convolution.
        reading: block by block with a weight for each level, or as their fold.
        levels: levels with weights of their own; higher ones share the last. Training on n tokens reaches
            log2(n / chunk) levels.
        write_strength: the largest share β that a write replaces of what is stored at its key, up to 2.
        gate: whether the output is multiplied by SiLU(W_gate · x).
        summary: width of a vector per head that summarises a block, so that its weight depends on what it contains.
        summary_merge: how the summaries of two blocks become one: their mean, or a GRC.
        merge_gate: whether merges scale what they keep of the earlier block, by gates from both summaries.
    """

    def __init__(
        self,
        dim: int,
        *,
        heads: int = 8,
        key_width: int | None = None,
        value_width: int | None = None,
        chunk: int = 64,
        conv: int = 4,
        reading: Literal["levels", "fold"] = "levels",
        levels: int = 3,
        write_strength: float = 1.0,
        gate: bool = True,
        summary: int = 0,
        summary_merge: SummaryMerge = "mean",
        merge_gate: bool = False,
    ) -> None:
        super().__init__()
        MemoryConfig(  # which checks the values
            heads=heads,
            key_width=key_width,
            value_width=value_width,
            chunk=chunk,
            conv=conv,
            reading=reading,
            levels=levels,
            write_strength=write_strength,
            summary=summary,
            summary_merge=summary_merge,
            merge_gate=merge_gate,
        )
        if dim % heads and (key_width is None or value_width is None):
            raise ValueError(f"dim {dim} does not divide into {heads} heads; give key_width and value_width")
        self.dim, self.heads, self.chunk, self.levels = dim, heads, chunk, levels
        self.key_width, self.value_width = key_width or dim // heads, value_width or dim // heads
        self.reads_levels, self.write_strength = reading == "levels", write_strength
        self.summary = summary
        self.operator = MatrixAffineOperator(heads, self.key_width, self.value_width)
        self.into_heads = Linear(dim, heads * (2 * self.key_width + self.value_width), bias=False)
        self.conv = ShortConv(self.into_heads.out_features, conv) if conv else None
        self.rates = Linear(dim, 2 * heads, bias=False)
        self.decay_bias = nn.Parameter(torch.tensor(np.linspace(-6.0, -2.0, heads).tolist()))
        if self.reads_levels:
            self.level_slopes = Linear(dim, 2 * heads, bias=False)
            nn.init.zeros_(self.level_slopes.weight)
            # Of all levels and heads. A vector, because matrices decay, and Muon would take it for a map.
            self.level_bias = nn.Parameter(torch.zeros(levels * heads))
        self.summarising: SummarisingOperator | None = None
        if summary:
            self.into_summary = Linear(dim, heads * summary, bias=False)
            self.summary_query = Linear(dim, heads * summary, bias=False)
            nn.init.zeros_(self.summary_query.weight)
            self.summarising = SummarisingOperator(self.operator, summary, merge=summary_merge, gated=merge_gate)
        self.head_norm = RMSNorm(self.value_width, eps=1e-6)
        self.gate = Linear(dim, heads * self.value_width, bias=False) if gate else None
        self.out = Linear(heads * self.value_width, dim, bias=False)

    def forward(
        self, x: Tensor, *, lengths: LengthsLike | None = None, cu_seqlens: LengthsLike | None = None
    ) -> Tensor:
        """The output for whole sequences, shaped as `x`.

        Args:
            x: `[batch, length, dim]`, or with `cu_seqlens` packed documents `[total, dim]`.
            lengths: valid positions of each row of a batch padded on the right.
            cu_seqlens: where each packed document starts, and last the total.
        """
        return self.run(x, None, Layout(x.shape[:-1], lengths=lengths, cu_seqlens=cu_seqlens))[0]

    def step(self, x: Tensor, state: Any, *, lengths: LengthsLike | None = None) -> tuple[Tensor, Any]:
        """The output for any number of further positions `[batch, length, dim]`, and the state after them."""
        if len(x) != len(_tensors(state)[0]):
            raise ValueError(f"x has {len(x)} rows, but the state has {len(_tensors(state)[0])}")
        return self.run(x, state, Layout(x.shape[:-1], lengths=lengths))

    def run(self, x: Tensor, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        """The output and the state after it, for any layout, as blocks have it."""
        memory, *window = (None,) if state is None else _tensors(state)
        projected, rates = self.into_heads(x), self.rates(x)
        slopes = self.level_slopes(x) if self.reads_levels else None
        summaries = (self.summary_query(x), self.into_summary(x)) if self.summarising is not None else None
        if self.conv is None:
            projected = F.silu(projected)
        else:
            projected, after = self.conv(projected, None if state is None else TensorState(tuple(window)), layout)
            window = list(after.tensors)
        precision = dot_precision(x)
        with without_autocast(x):
            tokens = self._tokens(projected, rates, slopes, summaries)
            if isinstance(state, StaticMemoryState):
                assert isinstance(layout, StepLayout)
                outputs, memory = self._step_in_place(tokens, state, layout)
                state = TensorState((memory, *window))
            elif self.reads_levels:
                outputs, memory, tree, lengths = self._read_levels(tokens, state, layout, precision)
                state = MemoryState(lengths, tree, TensorState((memory, *window)))
            elif isinstance(layout, StepLayout):
                assert memory is not None
                outputs, memory = self._step_fold(tokens, memory)
                state = TensorState((memory, *window))
            else:
                outputs, memory = self._read_fold(tokens, memory, layout, precision)
                state = TensorState((memory, *window))
        mixed = self.head_norm(outputs).flatten(-2).to(product_dtype(x))  # memories are in float32 at least
        if self.gate is not None:
            mixed = mixed * F.silu(self.gate(x))
        return self.out(mixed), state

    def init_state(self, batch: int) -> Any:
        """The state of `batch` rows that have absorbed nothing."""
        weight, dtype = self.out.weight, self._dtype
        window = () if self.conv is None else self.conv.init_state(batch).tensors
        if not self.reads_levels:
            empty = weight.new_zeros(batch, self.heads, self.key_width, self.value_width, dtype=dtype)
            return TensorState((empty, *window))
        opened = self._nothing_open(batch, weight.device)
        tree = TreeState.empty(batch, opened.shape[1], dtype=dtype, device=weight.device)
        return MemoryState(torch.zeros(batch, dtype=torch.int64), tree, TensorState((opened, *window)))

    @property
    def _dtype(self) -> torch.dtype:
        """The dtype of memories, whatever autocast says."""
        return torch.promote_types(self.out.weight.dtype, torch.float32)

    def _tokens(
        self, projected: Tensor, rates: Tensor, slopes: Tensor | None, summaries: tuple[Tensor, Tensor] | None
    ) -> Tokens:
        dtype, shape = self._dtype, projected.shape[:-1]
        decay, strength = rates.to(dtype).view(*shape, 2, self.heads).unbind(-2)
        nothing = decay.new_empty(*shape, self.heads, 0)
        weighing = nothing if slopes is None else slopes.to(dtype).view(*shape, self.heads, 2)
        summarised = nothing
        if summaries is not None:
            queries, summarised = (one.to(dtype).view(*shape, self.heads, self.summary) for one in summaries)
            weighing = torch.cat([weighing, queries], dim=-1)
        return Tokens(
            projected.view(*shape, self.heads, 2 * self.key_width + self.value_width),
            -F.softplus(decay + self.decay_bias),
            self.write_strength * strength.sigmoid(),
            weighing,
            summarised,
        )

    def _read_levels(
        self, tokens: Tokens, state: MemoryState | None, layout: Layout, precision: DotPrecision
    ) -> tuple[Tensor, Tensor, TreeState, Tensor]:
        """Outputs, and the open chunks, the tree and the lengths after them."""
        absorbed = np.zeros(layout.num_rows, dtype=np.int64) if state is None else state.lengths.numpy()
        pieces = pieces_of(layout, self.chunk, absorbed % self.chunk, tokens.log_decay.device)
        before = None if state is None else state.tensors.tensors[0]
        reading, elements, slopes = self._own_chunks(tokens, pieces, before)

        complete = elements if len(pieces.complete) == len(elements) else elements.index_select(0, pieces.complete)
        bounds = np.concatenate([[0], pieces.num_complete.cumsum()])
        leaves, blocks = self._leaves(complete), None if state is None else state.tree
        tree = build_tree(self.summarising or self.operator, leaves, blocks, cu_seqlens=bounds)
        readers = pieces.row, (absorbed // self.chunk)[pieces.row] + pieces.number
        reads, table = partial(tree.reads, *readers), tree.table(*readers)
        outputs = read_blocks(*reading, reads, table, slopes, self.level_bias, precision=precision)

        nothing = self._nothing_open(layout.num_rows, elements.device)
        opened = nothing if before is None else before.index_copy(0, pieces.rows, nothing[: len(pieces.rows)])
        if len(pieces.open):  # otherwise the gradient of all elements would get a sum with zeros
            opened = opened.index_copy(0, pieces.open_rows, elements.index_select(0, pieces.open))
        lengths = torch.from_numpy(absorbed + layout.new)
        return self._joined(outputs, pieces, layout), opened, tree.state, lengths

    def _read_fold(
        self, tokens: Tokens, memory: Tensor | None, layout: Layout, precision: DotPrecision
    ) -> tuple[Tensor, Tensor]:
        """Outputs, and the memory S after them."""
        nothing_open = np.zeros(layout.num_rows, dtype=np.int64)  # where chunks end makes no difference
        pieces = pieces_of(layout, self.chunk, nothing_open, tokens.log_decay.device)
        if memory is None:
            memory = tokens.log_decay.new_zeros(layout.num_rows, self.heads, self.key_width, self.value_width)
        unread = memory.new_zeros(*memory.shape[:-1], self.key_width)
        before = torch.cat([unread, memory], dim=-1).flatten(1)
        reading, elements, _ = self._own_chunks(tokens, pieces, before)
        prefixes, _ = scan(self.operator, elements, cu_seqlens=pieces.bounds)
        table = BlockTable(prefixes, prefixes.detach()[:0], prefix_index(pieces, prefixes.device))
        outputs = read_blocks(*reading, partial(_prefixes_before, prefixes, pieces), table, precision=precision)
        _, written = self.operator.parts(prefixes.index_select(0, pieces.last))
        return self._joined(outputs, pieces, layout), memory.index_copy(0, pieces.rows, written)

    def _own_chunks(self, tokens: Tokens, pieces: Pieces, before: Tensor | None) -> tuple[Reading, Tensor, Tensor]:
        """What tokens read of their own chunks, the elements of the pieces, and the slopes of their weights.

        The first piece of each row continues the chunk `before`: tokens read it too, and it is merged into the element.
        """
        last = tokens.log_decay.ndim - 2
        cut = Tokens(*(pieces.cut(one.flatten(0, last)).transpose(1, 2) for one in tokens))
        own = delta_chunks(cut.vectors, cut.log_decay, cut.strength, self.key_width)
        reading, elements = Reading(own.outputs, own.queries), own.matrices.flatten(1)
        sums = cut.summarised.sum(2).flatten(1)
        if before is not None:
            memories, sums_before = self._parts(before.index_select(0, pieces.rows))
            reading = self._past(memories, reading, pieces.first)
            merged = self.operator(memories, elements.index_select(0, pieces.first))
            elements = elements.index_copy(0, pieces.first, merged)
            sums = sums.index_add(0, pieces.first, sums_before)
        return reading, torch.cat([elements, sums], dim=1) if self.summary else elements, cut.slopes

    def _past(self, memories: Tensor, reading: Reading, readers: Tensor) -> Reading:
        """Reads a block each, and passes on with the queries q M."""
        return Reading(*read_level(*reading, readers, memories))

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """[M | S] of all heads, and the summaries or sums behind it, which may have no width."""
        return rows[:, : self.operator.width], rows[:, self.operator.width :]

    def _leaves(self, complete: Tensor) -> Tensor:
        """Chunks that are complete as leaves of the tree."""
        return complete if self.summarising is None else self.summarising.leaves(complete, self.chunk)

    def _nothing_open(self, count: int, device: torch.device) -> Tensor:
        """Open chunks without tokens."""
        identity = self.operator.identity(count, dtype=self._dtype, device=device)
        return F.pad(identity, (0, self.heads * self.summary)) if self.summary else identity

    def _joined(self, outputs: Tensor, pieces: Pieces, layout: Layout) -> Tensor:
        """Outputs `[…, heads, value_width]` in the layout of the tokens."""
        return pieces.joined(outputs.transpose(1, 2)).view(*layout.shape, self.heads, self.value_width)

    def _step_fold(self, tokens: Tokens, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Outputs of one token of every row, and the memory S after it."""
        queries, memory = self._written(Tokens(*(part[:, 0] for part in tokens)), memory)
        return (queries @ memory).transpose(1, 2), memory

    def _written(self, one: Tokens, matrices: Tensor) -> tuple[Tensor, Tensor]:
        """The query of one token of every row, `[rows, heads, 1, key_width]`, and matrices after the token."""
        widths = [self.key_width, self.key_width, self.value_width]
        queries, keys, values = torch.split(one.vectors.to(self._dtype), widths, dim=-1)
        after = delta_step(matrices, normalised(keys), values, one.log_decay, one.strength)
        return normalised(queries)[:, :, None], after

    def _step_in_place(self, tokens: Tokens, state: StaticMemoryState, layout: StepLayout) -> tuple[Tensor, Tensor]:
        """Outputs of one token of every row, and the open chunks. Which blocks are read is decided on the device."""
        one = Tokens(*(part[:, 0] for part in tokens))
        memories, sums = self._parts(state.tensors.tensors[0])
        queries, own = self._written(one, self.operator.matrices(memories))
        opened = own.flatten(1)
        if self.summary:
            opened = torch.cat([opened, sums + one.summarised.flatten(1)], dim=1)
        transition, written = torch.split(own, self.operator.widths, dim=-1)
        outputs, queries = queries @ written, queries @ transition
        positions = layout.row_positions(opened.device)
        for level, blocks in enumerate(state.tree.blocks):
            held = (positions // self.chunk >> level & 1).bool()[..., None, None]
            memories, summaries = self._parts(blocks[: len(opened)])
            transition, written = self.operator.parts(memories)
            weights = level_weights(level, one.slopes[:, :, None], self.level_bias, summaries)
            outputs = torch.where(held, outputs + weights * (queries @ written), outputs)
            queries = torch.where(held, queries @ transition, queries)
        operator, leaves = self.summarising or self.operator, self._leaves(opened)
        state.tree.carry(operator, leaves, layout.step, layout.index, self.chunk.bit_length() - 1)
        opened = torch.where((positions + 1) % self.chunk == 0, self._nothing_open(1, opened.device), opened)
        return outputs.transpose(1, 2), opened


def _prefixes_before(prefixes: Tensor, pieces: Pieces) -> list[BlockRead]:
    """The prefix that ends before each piece, as a block that it reads."""
    return [BlockRead(0, pieces.later, prefixes.index_select(0, pieces.later - 1))]


def _tensors(state: Any) -> tuple[Tensor, ...]:
    tensors: tuple[Tensor, ...] = (state if isinstance(state, TensorState) else state.tensors).tensors
    return tensors


class MemoryBlock(Block):
    """x + dropout(MemoryLayer(norm(x))); its state is O(log n), or of fixed size if it is read as a fold."""

    def __init__(self, dim: int, config: MemoryConfig) -> None:
        super().__init__()
        self.norm = norm_named(config.norm, dim)
        self.layer = MemoryLayer(
            dim,
            heads=config.heads,
            key_width=config.key_width,
            value_width=config.value_width,
            chunk=config.chunk,
            conv=config.conv,
            reading=config.reading,
            levels=config.levels,
            write_strength=config.write_strength,
            gate=config.gate,
            summary=config.summary,
            summary_merge=config.summary_merge,
            merge_gate=config.merge_gate,
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, state: Any, layout: Layout) -> tuple[Tensor, Any]:
        added, state = self.layer.run(self.norm(x), state, layout)
        return x + self.dropout(added), state

    def init_state(self, batch: int) -> Any:
        return self.layer.init_state(batch)

    def static_state(self, state: Any) -> StaticState | None:
        if isinstance(state, TensorState):
            return super().static_state(state)
        return StaticMemoryState(self.layer.chunk, StaticTreeState.of(state.tree), StaticTensors(state.tensors))

    def residual_outputs(self) -> Sequence[nn.Linear]:
        return (self.layer.out,)

    def initialise(self, deviation: float) -> None:
        """The projections; merges keep their own initialisation. All weights λ are 1 at the start."""
        for linear in self.layer.children():
            if isinstance(linear, nn.Linear):
                nn.init.normal_(linear.weight, std=deviation)
        for name in ("level_slopes", "summary_query"):
            if hasattr(self.layer, name):
                nn.init.zeros_(getattr(self.layer, name).weight)
