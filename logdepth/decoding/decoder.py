"""Decoder: streams of a ScanLM, one token at a time for all of them, with its state in place.

The same merges as the scan's, so the same answers; about two a token and row, however long the rows are, and however
different. Rows that stand at one length share every operator call; others meet at each level of their trees.
"""

import contextlib
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from logdepth.decoding.counter import Apart, Together, next_step, together
from logdepth.decoding.step_graphs import StepGraphs
from logdepth.decoding.tables import Tables
from logdepth.decoding.weights import Weights
from logdepth.kernels import launched_where
from logdepth.models import ScanLM
from logdepth.models.scan_lm import ScanLMState
from logdepth.scanning.device_index import index_on
from logdepth.scanning.integers import integers
from logdepth.scanning.lengths import Ints, Lengths


class Decoder:
    """Goes on from a state that `model.step` left, without changing it; in the autocast that is on when it steps."""

    tokens: Tensor
    """`[batch]`, int64: a step is soonest given what is written here. Another tensor once streams were left out."""
    _length: int | None
    """Of all rows of the tables, where it is the same."""
    _each: Ints
    """Of each of the rows elsewhere."""
    _rows: Ints
    """The row of each stream: tables may still hold streams that were left out."""
    _kept: Tensor | None
    """The same on the device; None where streams and rows are the same."""
    _logits: Tensor | None
    """`[rows, vocab]`, of the last step."""

    def __init__(
        self,
        model: ScanLM,
        state: ScanLMState,
        *,
        graphs: bool = False,
        leaf_table: bool | None = None,
        kernels: bool | None = None,
        say: Callable[[str], None] = warnings.warn,
    ) -> None:
        """
        Args:
            model: in eval mode. Its weights are read at the first step, and must stay as they are.
            state: where the streams stand.
            graphs: on CUDA, record steps as CUDA graphs; elsewhere it changes nothing.
            leaf_table: compute the leaves of all tokens once. By default on CUDA, where that takes next to no time.
            kernels: merge by fused kernels, where the operator has some. By default on CUDA.
            say: told in one line, once, where graphs cannot be recorded.
        """
        if model.training:
            raise ValueError("a Decoder needs a model in eval mode: call model.eval() first")
        if not isinstance(model, ScanLM) or not isinstance(state, ScanLMState):
            got = f"{type(model).__name__} and {type(state).__name__}"
            raise TypeError(f"a Decoder takes a ScanLM and a state of it; got {got}")
        if len(state.layers) != len(model.layers):
            raise ValueError(f"the state has {len(state.layers)} layers, the model {len(model.layers)}")
        first = state.layers[0]
        if first.width != model.config.width:
            raise ValueError(f"the state has width {first.width}, the model {model.config.width}")
        self.model, self.device = model, first.device
        self._kind = self.device.type
        on_cuda = self._kind == "cuda"
        self._leaf_table = on_cuda if leaf_table is None else leaf_table
        self._kernels = on_cuda if kernels is None else kernels
        self._graphs = StepGraphs(self.device, say) if graphs and on_cuda else None
        self._weights: Weights | None = None
        self._autocast: torch.dtype | None = None
        self._torn = False
        """Whether a step began that did not end."""
        self._hold(state, levels=first.row_lengths.longest.bit_length() + 1)

    @property
    def batch(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the streams' state on the device."""
        return sum(tables.nbytes for tables in self._tables)

    def step(self, tokens: Tensor) -> Tensor:
        """One token of every stream, `[batch]`: the logits of the next, `[batch, vocab]`, valid until the next step."""
        # A recorded step takes a GPU so little time that everything here counts.
        self._refuse_if_torn()
        if tokens is not self.tokens:
            self._check(tokens)
            self.tokens.copy_(tokens)
        if self._kind == "cpu":
            self._check_range()
        if self._kept is not None:
            self._row_tokens.index_copy_(0, self._kept, self.tokens)
        self._read_weights()
        self._make_room()
        shape: Together | Apart
        if self._length is not None:
            shape, index_size, recurs = together(self._length), 0, True
        else:
            shape, lists, recurs = next_step(self._each, padded=self._graphs is not None)
            index_size = lists.size
            if index_size:
                self._index[:index_size].copy_(_on_host(lists, self.device), non_blocking=True)
        compute = partial(self._compute, shape, index_size)
        self._torn = True
        with launched_where(self.tokens):
            if self._graphs is not None and recurs:
                self._graphs.run(shape, compute)
            else:
                compute()
        self._torn = False
        if self._length is not None:
            self._length += 1
        else:
            self._each += 1
        assert self._logits is not None
        return self._logits if self._kept is None else self._logits.index_select(0, self._kept)

    def state(self) -> ScanLMState:
        """Where the streams stand, for going on elsewhere."""
        return self._state_of(self._rows)

    def _state_of(self, rows: Ints) -> ScanLMState:
        self._refuse_if_torn()
        return ScanLMState(tuple(tables.state(self._lengths(), rows) for tables in self._tables))

    def select(self, rows: Sequence[int] | Tensor) -> None:
        """Keeps the given streams, in the given order; one may come twice or not at all."""
        chosen = integers("rows", rows)
        outside = chosen[(chosen < -self.batch) | (chosen >= self.batch)]
        if outside.size:
            raise IndexError(f"row {outside[0]} is not among the {self.batch} streams")
        kept = self._rows[chosen]
        # Recorded steps are worth more than the work on streams that have ended, until those are the most.
        in_place = len(np.unique(kept)) == len(chosen) and 2 * len(chosen) > len(self._row_tokens)
        if self._graphs is None or not in_place:
            self._hold(self._state_of(kept), self._levels)
        else:
            # Only then is anything changed: there may be no memory.
            self._kept, self.tokens = index_on(self.device, kept), self._integers(len(chosen))
            self._rows = kept

    def _refuse_if_torn(self) -> None:
        if self._torn:
            raise RuntimeError("a step failed half-way and left the streams between two tokens: make a new Decoder")

    def _check(self, tokens: Tensor) -> None:
        if not isinstance(tokens, Tensor):
            raise TypeError(f"tokens must be a tensor; got {type(tokens).__name__}")
        if tokens.shape != self.tokens.shape or tokens.dtype != torch.int64:
            got = f"{tokens.dtype} of shape {tuple(tokens.shape)}"
            raise ValueError(f"tokens must be int64 of shape ({self.batch},), one a stream; got {got}")

    def _check_range(self) -> None:
        """On a CPU: a GPU would have to be waited for."""
        if self.batch and not 0 <= int(self.tokens.min()) <= int(self.tokens.max()) < self.model.vocab_size:
            raise IndexError(f"tokens must be from 0 to {self.model.vocab_size - 1}; got {self.tokens.tolist()[:8]}")

    def _hold(self, state: ScanLMState, levels: int) -> None:
        """Own copies of a state, in new memory; but tokens stay where they are, while there are as many."""
        batch = len(state.lengths)
        with torch.inference_mode():
            tables = [Tables.of(layer, levels) for layer in state.layers]
        index = self._integers(batch * (2 * levels + 8))
        as_many = hasattr(self, "tokens") and len(self.tokens) == batch
        tokens = self.tokens if as_many else self._integers(batch)
        # Only then is anything changed: there may be no memory.
        self._tables, self._index, self._levels = tables, index, levels
        self.tokens = self._row_tokens = tokens
        self._rows, self._kept, self._logits = np.arange(batch), None, None
        self._stand_at(state.lengths.numpy())
        if self._graphs is not None:
            self._graphs.forget()

    def _stand_at(self, lengths: Ints) -> None:
        known = Lengths.of(lengths)
        self._length = known.common
        self._each = known.array()

    def _lengths(self) -> Ints:
        """Of the rows of the tables."""
        return self._each if self._length is None else np.full(len(self._row_tokens), self._length)

    def _integers(self, count: int) -> Tensor:
        with torch.inference_mode(False):  # to be written to in any mode
            return torch.zeros(count, dtype=torch.int64, device=self.device)

    def _make_room(self) -> None:
        """For a level more, where one of the rows is going to need it; and for the logits."""
        longest = int(self._each.max()) if self._length is None else self._length
        if (longest + 1).bit_length() > self._levels:
            self._hold(self.state(), levels=2 * self._levels)
        if self._logits is None:
            assert self._weights is not None
            head = self._weights.head
            with torch.inference_mode():
                self._logits = head.new_zeros(len(self._row_tokens), len(head))

    def _read_weights(self) -> None:
        """At the first step, and again should autocast have changed since."""
        autocast = torch.get_autocast_dtype(self._kind) if torch.is_autocast_enabled(self._kind) else None
        if self._weights is None or autocast != self._autocast:
            with torch.inference_mode():
                self._weights = Weights.of(
                    self.model,
                    autocast,
                    self._tables[0].blocks.dtype,
                    leaf_table=self._leaf_table,
                    kernels=self._kernels,
                )
            self._autocast, self._logits = autocast, None
            if self._graphs is not None:
                self._graphs.forget()

    def _arithmetic(self) -> contextlib.AbstractContextManager[object]:
        """The caller's autocast, without its cache: a recorded step must not read what is gone by its replay."""
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._kind, dtype=self._autocast, cache_enabled=False)

    @torch.inference_mode()
    def _compute(self, shape: Together | Apart, index_size: int) -> None:
        """The whole step on the device: it reads and writes nothing that is not the decoder's."""
        assert self._weights is not None
        assert self._logits is not None
        head = self._weights.head
        with self._arithmetic():
            features = self._features(self._weights, shape, self._index[:index_size])
        torch.mm(features.to(head.dtype), head.t(), out=self._logits)

    def _features(self, weights: Weights, shape: Together | Apart, index: Tensor) -> Tensor:
        """What the head reads."""
        features: Tensor | None = None
        for number, tables in enumerate(self._tables):
            leaves = self._leaves(weights, number, features, tables.room_for_leaves(shape))
            output = self._output(weights, number, features, tables, leaves, shape, index)
            features = output if features is None else features + output
        assert features is not None
        return features

    def _leaves(self, weights: Weights, number: int, features: Tensor | None, room: Tensor) -> Tensor:
        """Of a layer; `features`: what it reads, None where that is the tokens' embeddings."""
        if features is None and weights.leaves is not None:
            return torch.index_select(weights.leaves, 0, self._row_tokens, out=room)
        leaves = weights.layers[number].leaves(self._embedded(weights) if features is None else features)
        return leaves.to(room.dtype)

    def _output(
        self,
        weights: Weights,
        number: int,
        features: Tensor | None,
        tables: Tables,
        leaves: Tensor,
        shape: Together | Apart,
        index: Tensor,
    ) -> Tensor:
        few = None if weights.few_rows is None else weights.few_rows[number]
        if few is None or not few.fits(tables.batch):
            prefixes = tables.advance(*weights.operators[number], leaves, shape, index)
            return weights.layers[number].output(prefixes, self._embedded(weights) if features is None else features)
        inputs, looked_up = (weights.embedding, self._row_tokens) if features is None else (features, None)
        if isinstance(shape, Together) and shape.folds:
            return few.output(*tables.advance_unsettled(few, leaves, shape), inputs, looked_up)
        prefixes = tables.advance(few.up, few.down, leaves, shape, index)
        return few.output(prefixes, prefixes, inputs, looked_up)

    def _embedded(self, weights: Weights) -> Tensor:
        return F.embedding(self._row_tokens, weights.embedding)


def _on_host(index: Ints, device: torch.device) -> Tensor:
    """The index as a tensor on the host, from where a copy to the device need not be waited for."""
    tensor = torch.from_numpy(index)
    return tensor.pin_memory() if device.type == "cuda" else tensor
