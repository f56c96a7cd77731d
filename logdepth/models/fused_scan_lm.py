"""How an accelerated ScanLM computes what its head reads: the same model by fused kernels.

The leaf of a token depends on nothing but the token, unless embeddings are dropped: so the first layer's leaves are
computed once for each entry of the vocabulary where there are more tokens than entries, and looked up.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from logdepth.capture import keep
from logdepth.fused import FusedOperator
from logdepth.fused.casts import Casts, arithmetic_dtype
from logdepth.fused.linear_and_norm import linear, normed
from logdepth.fused.lookups import Lookups, RoomFor
from logdepth.kernels.dropout import rate_of
from logdepth.models.embedding_net import EmbeddingNet
from logdepth.shapes import Rows, Tokens

if TYPE_CHECKING:
    from logdepth.models.scan_lm import ScanLayer, ScanLM

FusedPrefixesOf = Callable[[FusedOperator, Tensor], Tensor]


class FusedScanLM:
    """Stands beside a ScanLM, whose weights it reads."""

    def __init__(self) -> None:
        self._holds = False
        """Whether weights stay as they are."""
        self._leaf_table: Tensor | None = None
        """The leaves of all tokens, computed since they do."""

    @contextmanager
    def weights_held(self) -> Iterator[None]:
        outer, self._holds = self._holds, True
        try:
            yield
        finally:
            self._holds = outer
            if not outer:
                self._leaf_table = None

    def features(self, model: "ScanLM", tokens: Tokens, prefixes_of: FusedPrefixesOf) -> Tensor:
        """What the head reads; `prefixes_of` makes the states of all prefixes of leaves shaped as the tokens."""
        weight = model.embedding.weight
        casts = Casts(_read_by_products(model.layers), arithmetic_dtype(weight))
        lookups = Lookups(tokens, model.vocab_size)
        features = None
        if rate_of(model.embed_dropout):
            features = model.embed_dropout(F.embedding(lookups.tokens, weight).to(casts.dtype))
        for number, layer in enumerate(model.layers):
            fused = FusedOperator(layer.operators(), casts)
            leaves = (
                self._leaves_of_tokens(model, layer, casts, lookups, fused.room)
                if features is None
                else _leaves(casts, layer, features)
            )
            prefixes = prefixes_of(fused, leaves.view(*tokens.shape, layer.width)).flatten(0, -2)
            del leaves  # with what lies behind them
            output = linear(casts, layer.out_of_state, prefixes.to(casts.dtype))
            if features is None:
                output = lookups.added(output, weight, layer.input_residual)
            else:
                output = torch.add(output, features, alpha=layer.input_residual)
            features = features + output if number and features is not None else output
        assert features is not None
        read: Tensor = model.output_dropout(features)
        return read.view(*tokens.shape, read.shape[-1])

    def _leaves_of_tokens(
        self, model: "ScanLM", layer: "ScanLayer", casts: Casts, lookups: Lookups, room_for: RoomFor
    ) -> Rows:
        weight = model.embedding.weight
        if len(lookups.tokens) <= model.vocab_size:
            return _leaves(casts, layer, F.embedding(lookups.tokens, weight))
        if not self._holds or torch.is_grad_enabled() or rate_of(layer.leaf_dropout):
            return lookups.leaves(_hidden(casts, layer, weight), layer.leaf_norm, layer.leaf_dropout, room_for)
        table = self._leaf_table
        if table is None or table.dtype != casts.dtype:
            table = _leaves(casts, layer, weight)
            if not (weight.is_cuda and torch.cuda.is_current_stream_capturing()):  # a capture computes nothing
                self._leaf_table = table
        keep(table)
        return lookups.rows(table, room_for)


def _read_by_products(layers: "Sequence[ScanLayer]") -> Iterator[Tensor]:
    """All weights but those of norms, which kernels read as they are."""
    for part in (part for layer in layers for part in layer.modules()):
        if not isinstance(part, nn.LayerNorm):
            yield from part.parameters(recurse=False)


def _leaves(casts: Casts, layer: "ScanLayer", features: Rows) -> Rows:
    hidden = _hidden(casts, layer, features)
    return hidden if layer.leaf_norm is None else hidden + layer.leaf_dropout(normed(casts, layer.leaf_norm, hidden))


def _hidden(casts: Casts, layer: "ScanLayer", features: Rows) -> Rows:
    hidden = linear(casts, layer.into_state, normed(casts, layer.norm, features))
    net = layer.embedding_net
    return net.fused(casts, hidden) if isinstance(net, EmbeddingNet) else net(hidden)
