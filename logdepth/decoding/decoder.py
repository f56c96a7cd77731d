"""Decoder: one token at a time for all rows of a batch, with the state of every block in place.

A step is the model's own forward pass with static states, so it gives the same answers. Rows may have different
lengths. Rows of one length share every operator call; others meet at each level of their trees.
"""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from logdepth.blocks import StaticState, StepLayout
from logdepth.decoding.step_graphs import StepGraphs
from logdepth.keep_alive import keep
from logdepth.models import LM, LMState
from logdepth.ops import Casts, FrozenTable, use_kernels, using_casts
from logdepth.ops.dispatch import on_device_of
from logdepth.scanning.device_index import index_on
from logdepth.scanning.integers import integers
from logdepth.scanning.lengths import Ints, Lengths
from logdepth.scanning.step import Apart, Together, next_step, together


class Decoder:
    """Continues a state that `model.step` returned, without changing it, in the autocast that is on when it steps."""

    tokens: Tensor
    """`[batch]`, int64. A step is fastest when its tokens are written here. `select` may replace this tensor."""
    _length: int | None
    """The length of all rows, where it is the same."""
    _each: Ints
    """The length of each row otherwise."""
    _rows: Ints
    """The row of each sequence: states may still hold sequences that were left out."""
    _kept: Tensor | None
    """The same on the device; None where sequences and rows are the same."""
    _advances: Tensor
    """By how much each row grows in a step, `[rows, 1]`, on the device: 1, or 0 where it stands empty."""
    _counts: Ints
    """The same on the host."""

    def __init__(
        self,
        model: LM,
        state: LMState,
        *,
        graphs: bool | None = None,
        on_warning: Callable[[str], None] = warnings.warn,
    ) -> None:
        """
        Args:
            model: in eval mode. Its weights are read at the first step, and must stay as they are.
            state: the state to continue.
            graphs: record steps as CUDA graphs; by default where the model is on a GPU.
            on_warning: called with one line, once, if steps cannot be recorded.
        """
        if model.training:
            raise ValueError("a Decoder needs a model in eval mode: call model.eval() first")
        if not isinstance(model, LM) or not isinstance(state, LMState):
            got = f"{type(model).__name__} and {type(state).__name__}"
            raise TypeError(f"a Decoder takes an LM and a state of it; got {got}")
        if len(state.blocks) != len(model.blocks):
            raise ValueError(f"the state has {len(state.blocks)} blocks, the model {len(model.blocks)}")
        self.model, self.device = model, model.embedding.weight.device
        on_cuda = self.device.type == "cuda"
        self._graphs = StepGraphs(self.device, on_warning) if on_cuda and graphs is not False else None
        self._table = FrozenTable(always=on_cuda)
        self._casts: Casts | None = None
        self._autocast: torch.dtype | None = None
        self._broken = False
        """Whether a step began and did not end."""
        self._hold(state)

    @property
    def batch(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the state on the device."""
        return sum(one.nbytes for one in self._states if one is not None)

    def step(self, tokens: Tensor) -> Tensor:
        """Absorbs one token of every row, `[batch]`; returns logits `[batch, vocab]`, valid until the next step."""
        # A recorded step takes a GPU so little time that everything here counts.
        self._refuse_if_broken()
        if tokens is not self.tokens:
            self._check(tokens)
            self.tokens.copy_(tokens)
        if self.device.type == "cpu":
            self._check_range()
        if self._kept is not None:
            self._row_tokens.index_copy_(0, self._kept, self.tokens)
        self._read_weights()
        longest = 1 + (self._length if self._length is not None else int(self._each.max(initial=0)))
        if longest > self._capacity:
            self._make_room(longest)
        shape, index_size, recurs = self._next_step()
        compute = partial(self._compute, shape, index_size)
        self._broken = True
        with on_device_of(self.tokens):
            logits = self._graphs.run(shape, compute) if self._graphs is not None and recurs else compute()
        self._broken = False
        if self._length is not None:
            self._length += 1
        else:
            self._each += self._counts
        return logits if self._kept is None else logits.index_select(0, self._kept)

    def state(self, rows: Sequence[int] | Tensor | None = None) -> LMState:
        """The state now, of all rows or of the given ones, to be continued elsewhere."""
        return self._state_of(self._rows if rows is None else self._chosen(rows))

    def select(self, rows: Sequence[int] | Tensor) -> None:
        """Keeps the given rows, in the given order; a row may be repeated or left out."""
        kept = self._chosen(rows)
        # Recorded steps are worth more than the work on rows that have ended, until those are the most.
        in_place = len(np.unique(kept)) == len(kept) and 2 * len(kept) > len(self._row_tokens)
        if self._graphs is None or not in_place:
            self._hold(self._state_of(kept), self._counts[kept])
        else:
            # Only then is anything changed: there may be no memory.
            self._kept, self.tokens = index_on(self.device, kept), self._integers(len(kept))
            self._rows = kept

    def replace(self, rows: Sequence[int] | Tensor, state: LMState) -> None:
        """Continues with a state's rows in place of the given rows, which all differ.

        The memory stays where it is, while there is room for rows as long, so that recorded steps remain valid.
        """
        self._put(self._chosen(rows), state, 1)

    def clear(self, rows: Sequence[int] | Tensor) -> None:
        """Leaves the given rows empty until `replace` fills them: they stay at length 0.

        A step takes as long as before, and the logits of empty rows mean nothing.
        """
        chosen = self._chosen(rows)
        self._put(chosen, self.model.init_state(len(chosen)), 0)

    def _chosen(self, rows: Sequence[int] | Tensor) -> Ints:
        """The given rows among those that states hold."""
        chosen = integers("rows", rows)
        outside = chosen[(chosen < -self.batch) | (chosen >= self.batch)]
        if outside.size:
            raise IndexError(f"row {outside[0]} is not among the {self.batch} rows")
        kept: Ints = self._rows[chosen]
        return kept

    def _put(self, rows: Ints, state: LMState, count: int) -> None:
        self._refuse_if_broken()
        if len(np.unique(rows)) < len(rows):
            raise ValueError(f"rows must all differ; got {rows.tolist()[:8]}")
        if len(state.lengths) != len(rows) or len(state.blocks) != len(self._states):
            got = f"{len(state.lengths)} rows of {len(state.blocks)} blocks"
            raise ValueError(f"the state must have {len(rows)} rows of {len(self._states)} blocks; it has {got}")
        if not rows.size:
            return
        lengths = state.lengths.numpy()
        longest = 1 + int(lengths.max())
        if longest > self._capacity:
            self._make_room(longest)
        self._broken = True
        with torch.inference_mode(), on_device_of(self.tokens):
            for mine, new in zip(self._states, state.blocks, strict=True):
                if mine is not None:
                    mine.replace(rows, new)
        index = index_on(self.device, rows)
        self._positions.index_copy_(0, index, index_on(self.device, lengths)[:, None])
        self._advances.index_fill_(0, index, count)
        self._counts[rows] = count
        each = self._lengths().copy()
        each[rows] = lengths
        self._each, self._length = each, self._common(each, self._counts)
        self._broken = False

    def _state_of(self, rows: Ints) -> LMState:
        self._refuse_if_broken()
        lengths = self._lengths()
        blocks = tuple(None if one is None else one.state(lengths, rows) for one in self._states)
        return LMState(blocks, torch.from_numpy(lengths[rows]))

    def _refuse_if_broken(self) -> None:
        if self._broken:
            raise RuntimeError("a step failed half-way and left the state between two tokens: make a new Decoder")

    def _check(self, tokens: Tensor) -> None:
        if not isinstance(tokens, Tensor):
            raise TypeError(f"tokens must be a tensor; got {type(tokens).__name__}")
        if tokens.shape != self.tokens.shape or tokens.dtype != torch.int64:
            got = f"{tokens.dtype} of shape {tuple(tokens.shape)}"
            raise ValueError(f"tokens must be int64 of shape ({self.batch},), one per row; got {got}")

    def _check_range(self) -> None:
        """On a CPU only: a GPU would have to be waited for."""
        if self.batch and not 0 <= int(self.tokens.min()) <= int(self.tokens.max()) < self.model.vocab_size:
            raise IndexError(f"tokens must be from 0 to {self.model.vocab_size - 1}; got {self.tokens.tolist()[:8]}")

    def _hold(self, state: LMState, counts: Ints | None = None) -> None:
        """Copies a state into new memory; `tokens` stays where it is, while there are as many."""
        batch, lengths = len(state.lengths), state.lengths.numpy()
        counts = np.ones(batch, dtype=np.int64) if counts is None else counts
        with torch.inference_mode():
            states = [
                None if one is None else block.static_state(one)
                for block, one in zip(self.model.blocks, state.blocks, strict=True)
            ]
        index = self._integers(batch * (2 * int(lengths.max(initial=0)).bit_length() + 16))
        positions = self._integers(batch, 1)
        positions[:, 0] = torch.from_numpy(lengths)
        advances = self._integers(batch, 1)
        advances[:, 0] = torch.from_numpy(counts)
        as_many = hasattr(self, "tokens") and len(self.tokens) == batch
        tokens = self.tokens if as_many else self._integers(batch)
        # Only then is anything changed: there may be no memory.
        self._states: list[StaticState | None] = states
        self._index, self._positions = index, positions
        self._advances, self._counts = advances, counts
        self._steps_differ = any(one is not None and one.steps_differ for one in states)
        self.tokens = self._row_tokens = tokens
        self._rows, self._kept = np.arange(batch), None
        self._capacity = self._capacity_of(states, index)
        self._length, self._each = self._common(lengths, counts), lengths.copy()  # which is counted up in place
        if self._graphs is not None:
            self._graphs.forget()

    @staticmethod
    def _common(lengths: Ints, counts: Ints) -> int | None:
        """The length of all rows, where it is the same and stays so."""
        return Lengths.of(lengths).common if counts.all() else None

    def _lengths(self) -> Ints:
        """The lengths of all rows that the states hold."""
        return self._each if self._length is None else np.full(len(self._row_tokens), self._length)

    def _integers(self, *shape: int) -> Tensor:
        with torch.inference_mode(False):  # to be written to in any mode
            return torch.zeros(shape, dtype=torch.int64, device=self.device)

    def _make_room(self, longest: int) -> None:
        """Moves to memory for rows of this length and more."""
        with torch.inference_mode():
            for one in self._states:
                if one is not None:
                    one.make_room(longest)
        size = len(self._row_tokens) * (2 * longest.bit_length() + 16)
        if len(self._index) < size:
            self._index = self._integers(size)
        self._capacity = self._capacity_of(self._states, self._index)
        if self._graphs is not None:
            self._graphs.forget()

    def _capacity_of(self, states: Sequence[StaticState | None], index: Tensor) -> int:
        """The length up to which the states, and the lists of merges, have room."""
        rows = len(self._row_tokens)
        levels = (len(index) // rows - 8) // 2 if rows else 62
        return min([(1 << levels) - 1, *(one.capacity for one in states if one is not None)])

    def _next_step(self) -> tuple[Together | Apart, int, bool]:
        """Which merges the scans make in this step, the size of their lists, and whether such a step will recur."""
        if not self._steps_differ:
            return together(0), 0, True
        if self._length is not None:
            return together(self._length), 0, True
        shape, lists, recurs = next_step(self._each, padded=self._graphs is not None)
        if lists.size:
            self._index[: lists.size].copy_(_on_host(lists, self.device), non_blocking=True)
        return shape, lists.size, recurs

    def _read_weights(self) -> None:
        """At the first step, and again where autocast has changed since."""
        kind = self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if self._casts is not None and autocast == self._autocast:
            return
        model, dtype = self.model, autocast or self.model.embedding.weight.dtype
        kernels = use_kernels(model.embedding.weight)
        with torch.inference_mode():
            self._casts = Casts((*model.product_weights(), model.head_weight) if kernels else (), dtype)
        self._autocast, self._table = autocast, FrozenTable(always=self._table.always)
        if self._graphs is not None:
            self._graphs.forget()

    @torch.inference_mode()
    def _compute(self, shape: Together | Apart, index_size: int) -> Tensor:
        """The whole step on the device: it reads and writes only memory that stays where it is."""
        keep(self._casts)
        layout = StepLayout(self._positions, shape, self._index[:index_size])
        with self._arithmetic(), using_casts(self._casts), self.model.frozen_weights(self._table):
            features, states = self.model.run(self._row_tokens[:, None], self._states, layout)
            logits = self.model.logits(features[:, 0])
        for mine, new in zip(self._states, states, strict=True):
            if mine is not None:
                mine.update(new)
        self._positions.add_(self._advances)
        return logits

    def _arithmetic(self) -> contextlib.AbstractContextManager[object]:
        """The caller's autocast, without its cache: a recorded step must not read what is gone when it is replayed."""
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast, cache_enabled=False)


def _on_host(index: Ints, device: torch.device) -> Tensor:
    """The index as a tensor on the host, from where a copy to the device need not be waited for."""
    tensor = torch.from_numpy(index)
    return tensor.pin_memory() if device.type == "cuda" else tensor
