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

from logdepth.decoding.counter import Apart, Together, next_step
from logdepth.decoding.step_graphs import StepGraphs
from logdepth.decoding.tables import Tables
from logdepth.decoding.weights import Weights
from logdepth.models import ScanLM
from logdepth.models.scan_lm import ScanLMState
from logdepth.scanning.device_index import index_on
from logdepth.scanning.integers import integers
from logdepth.scanning.lengths import Ints


class Decoder:
    """Goes on from a state that `model.step` left, without changing it; in the autocast that is on when it steps."""

    _lengths: Ints
    """Of the rows of the tables, which may still hold streams that were left out."""
    _rows: Ints
    """The row of each stream."""
    _kept: Tensor | None
    """The same on the device; None where streams and rows are the same."""

    def __init__(
        self,
        model: ScanLM,
        state: ScanLMState,
        *,
        graphs: bool = False,
        leaf_table: bool | None = None,
        say: Callable[[str], None] = warnings.warn,
    ) -> None:
        """
        Args:
            model: in eval mode. Its weights are read at the first step.
            state: where the streams stand.
            graphs: on CUDA, record steps as CUDA graphs; elsewhere it changes nothing.
            leaf_table: compute the leaves of all tokens once. By default on CUDA, where that takes next to no time.
            say: told in one line, once, where graphs cannot be recorded.
        """
        if model.training:
            raise ValueError("a Decoder needs a model in eval mode: call model.eval() first")
        if len(state.layers) != len(model.layers):
            raise ValueError(f"the state has {len(state.layers)} layers, the model {len(model.layers)}")
        first = state.layers[0]
        self.model, self.device = model, first.device
        self._leaf_table = self.device.type == "cuda" if leaf_table is None else leaf_table
        self._graphs = StepGraphs(self.device, say) if graphs and self.device.type == "cuda" else None
        self._weights: Weights | None = None
        self._autocast: torch.dtype | None = None
        self._hold(state, levels=first.row_lengths.longest.bit_length() + 1)

    @property
    def batch(self) -> int:
        return len(self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the streams' state on the device."""
        return sum(tables.nbytes for tables in self._tables)

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """One token of every stream, `[batch]`: the logits of the next, `[batch, vocab]`, valid until the next step."""
        if tokens.shape != (self.batch,) or tokens.dtype != torch.int64:
            got = f"{tokens.dtype} of shape {tuple(tokens.shape)}"
            raise ValueError(f"tokens must be int64 of shape ({self.batch},), one a stream; got {got}")
        self._read_weights()
        longest = int(self._lengths.max(initial=0)) + 1
        if longest.bit_length() > self._levels:
            self._hold(self.state(), levels=2 * self._levels)

        shape, lists, recurs = next_step(self._lengths, padded=self._graphs is not None)
        if lists.size:
            self._index[: lists.size].copy_(_on_host(lists, self.device), non_blocking=True)
        if self._kept is None:
            self._tokens.copy_(tokens)
        else:
            self._tokens.index_copy_(0, self._kept, tokens)
        compute = partial(self._logits, shape, lists.size)
        with self._arithmetic():
            logits = self._graphs.run(shape, compute) if self._graphs is not None and recurs else compute()
        self._lengths += 1
        return logits if self._kept is None else logits.index_select(0, self._kept)

    def state(self) -> ScanLMState:
        """Where the streams stand, for going on elsewhere."""
        return ScanLMState(tuple(tables.state(self._lengths, self._rows) for tables in self._tables))

    def select(self, rows: Sequence[int] | Tensor) -> None:
        """Keeps the given streams, in the given order; one may come twice or not at all."""
        chosen = integers("rows", rows)
        outside = chosen[(chosen < -self.batch) | (chosen >= self.batch)]
        if outside.size:
            raise IndexError(f"row {outside[0]} is not among the {self.batch} streams")
        self._rows = self._rows[chosen]
        # Recorded steps are worth more than the work on streams that have ended, until those are the most.
        in_place = len(np.unique(self._rows)) == len(chosen) and 2 * len(chosen) > len(self._lengths)
        if self._graphs is None or not in_place:
            self._hold(self.state(), self._levels)
        else:
            self._kept = index_on(self.device, self._rows)

    def _hold(self, state: ScanLMState, levels: int) -> None:
        """Own copies of a state, in new memory."""
        self._lengths = state.lengths.numpy()
        self._levels = levels
        batch = len(self._lengths)
        self._rows, self._kept = np.arange(batch), None
        with torch.inference_mode():
            self._tables = [Tables.of(layer, levels) for layer in state.layers]
            self._tokens = torch.zeros(batch, dtype=torch.int64, device=self.device)
            self._index = torch.zeros(batch * (2 * levels + 8), dtype=torch.int64, device=self.device)
        if self._graphs is not None:
            self._graphs.forget()

    def _read_weights(self) -> None:
        """At the first step, and again should autocast have changed since."""
        kind = self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if self._weights is None or autocast != self._autocast:
            self._weights = Weights.of(self.model, autocast, self._tables[0].blocks.dtype, self._leaf_table)
            self._autocast = autocast
            if self._graphs is not None:
                self._graphs.forget()

    def _arithmetic(self) -> contextlib.AbstractContextManager[object]:
        """The caller's autocast, without its cache: a recorded step must not read what is gone by its replay."""
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, dtype=self._autocast, cache_enabled=False)

    def _logits(self, shape: Together | Apart, index_size: int) -> Tensor:
        """The whole step on the device: it reads and writes nothing that is not the decoder's."""
        assert self._weights is not None
        weights, tokens, index = self._weights, self._tokens, self._index[:index_size]
        features = F.embedding(tokens, weights.embedding)
        for number, (layer, (up, down)) in enumerate(zip(weights.layers, weights.operators, strict=True)):
            by_token = None if number else weights.leaves
            leaves = layer.leaves(features) if by_token is None else F.embedding(tokens, by_token)
            output = layer.output(self._tables[number].advance(up, down, leaves, shape, index), features)
            features = features + output if number else output
        return F.linear(features, weights.head)


def _on_host(index: Ints, device: torch.device) -> Tensor:
    """The index as a tensor on the host, from where a copy to the device need not be waited for."""
    tensor = torch.from_numpy(index)
    return tensor.pin_memory() if device.type == "cuda" else tensor
