"""How an accelerated ScanLM computes what its head reads: the same model by fused kernels.

The leaf of a token depends on nothing but the token, unless embeddings are dropped: so the first layer's leaves are
computed once for each entry of the vocabulary where there are more tokens than entries, and looked up.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from logdepth.capture import keep
from logdepth.fused import FusedGRC
from logdepth.fused.casts import Casts
from logdepth.fused.linear_normed import linear, normed
from logdepth.fused.lookups import Lookups
from logdepth.models.embedding_net import EmbeddingNet
from logdepth.models.language_model import arithmetic_dtype
from logdepth.shapes import Rows, Tokens

if TYPE_CHECKING:
    from logdepth.models.scan_lm import ScanLayer, ScanLM

FusedPrefixesOf = Callable[[FusedGRC, Tensor], Tensor]


class FusedScanLM:
    """Stands beside a ScanLM, whose weights it reads."""

    def __init__(self) -> None:
        self._leaf_table: tuple[object, Tensor] | None = None

    def features(self, model: "ScanLM", tokens: Tokens, prefixes_of: FusedPrefixesOf) -> Tensor:
        """What the head reads; `prefixes_of` makes the states of all prefixes of leaves shaped as the tokens."""
        if torch.is_grad_enabled() or model.training:
            self._leaf_table = None  # the weights are about to change, and not every optimizer counts that as a change
        weight = model.embedding.weight
        casts = Casts(model.layers.parameters(), arithmetic_dtype(weight))  # type: ignore[attr-defined]
        lookups = Lookups(tokens, model.vocab_size)
        features = None
        if model.training and model.embed_dropout.p:
            features = model.embed_dropout(F.embedding(lookups.tokens, weight).to(casts.dtype))
        for number, layer in enumerate(model.layers):
            leaves = (
                self._leaves_of_tokens(model, layer, casts, lookups)
                if features is None
                else _leaves(casts, layer, features)
            )
            fused = FusedGRC(layer.operators(), casts)
            prefixes = prefixes_of(fused, leaves.view(*tokens.shape, -1)).flatten(0, -2)
            output = linear(casts, layer.out_of_state, prefixes.to(casts.dtype))
            if features is None:
                output = lookups.added(output, weight, layer.input_residual)
            else:
                output = torch.add(output, features, alpha=layer.input_residual)
            features = features + output if number and features is not None else output
        assert features is not None
        read: Tensor = model.output_dropout(features)
        return read.view(*tokens.shape, -1)

    def _leaves_of_tokens(self, model: "ScanLM", layer: "ScanLayer", casts: Casts, lookups: Lookups) -> Rows:
        weight = model.embedding.weight
        if len(lookups.tokens) <= model.vocab_size:
            return _leaves(casts, layer, F.embedding(lookups.tokens, weight))
        if torch.is_grad_enabled() or model.training:
            return lookups.leaves(_hidden(casts, layer, weight), layer.leaf_norm, layer.leaf_dropout)
        # Nothing is learnt: the leaves are kept until a weight changes.
        versions = casts.dtype, *(_version(one) for one in (weight, *layer.parameters()))
        if self._leaf_table is None or self._leaf_table[0] != versions:
            self._leaf_table = versions, _leaves(casts, layer, weight)
        table = self._leaf_table[1]
        keep(table)
        return F.embedding(lookups.tokens, table)


def _leaves(casts: Casts, layer: "ScanLayer", features: Rows) -> Rows:
    hidden = _hidden(casts, layer, features)
    return hidden if layer.leaf_norm is None else hidden + layer.leaf_dropout(normed(casts, layer.leaf_norm, hidden))


def _hidden(casts: Casts, layer: "ScanLayer", features: Rows) -> Rows:
    hidden = linear(casts, layer.into_state, normed(casts, layer.norm, features))
    net = layer.embedding_net
    return net.fused(casts, hidden) if isinstance(net, EmbeddingNet) else hidden


def _version(weight: Tensor) -> tuple[int, int]:
    """Changes when the weight does."""
    return weight.data_ptr(), 0 if weight.is_inference() else weight._version
