"""What a decoder reads of a model: its weights as its arithmetic needs them, and the leaves of all tokens."""

import copy
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from logdepth.kernels import usable_on
from logdepth.models import ScanLM
from logdepth.models.scan_lm import ScanLayer
from logdepth.scanning import OperatorPair
from logdepth.scanning.merge import operator_pair
from logdepth.shapes import Rows

if TYPE_CHECKING:  # it needs Triton
    from logdepth.decoding.few_rows import FewRowsLayer

LARGEST_LEAF_TABLE = 2**28
"""Numbers in a table of the leaves of all tokens, at most."""
LEAVES_AT_ONCE = 2**14


@dataclass(frozen=True, slots=True)
class Weights:
    """Taken from a model once, some of them as copies: a model that has changed needs others."""

    embedding: Tensor
    layers: tuple[ScanLayer, ...]
    operators: tuple[OperatorPair, ...]
    head: Tensor
    leaves: Rows | None
    """`[vocab_size, width]` of the first layer, where a token alone decides; None where they are computed as needed."""

    few_rows: "tuple[FewRowsLayer, ...] | None"
    """The layers by kernels, where there are some for their operators."""

    @classmethod
    def of(
        cls, model: ScanLM, autocast: torch.dtype | None, dtype: torch.dtype, *, leaf_table: bool, kernels: bool
    ) -> "Weights":
        """`autocast`: the dtype that autocast is going to multiply in; `dtype`: that of the states."""
        head = model.embedding.weight if model.head is None else model.head.weight
        layers = tuple(layer if autocast is None else _cast_once(layer, autocast) for layer in model.layers)
        fits = model.vocab_size * model.config.width <= LARGEST_LEAF_TABLE
        few_rows = _few_rows(layers, dtype) if kernels and usable_on(head.device) else None
        return cls(
            embedding=model.embedding.weight,
            layers=layers,
            operators=tuple((few.up, few.down) for few in few_rows)
            if few_rows
            else tuple(operator_pair(layer.operators()) for layer in layers),
            head=head if autocast is None else _cast(head, autocast),
            leaves=_all_leaves(model, dtype) if leaf_table and fits else None,
            few_rows=few_rows,
        )


def _few_rows(layers: tuple[ScanLayer, ...], dtype: torch.dtype) -> "tuple[FewRowsLayer, ...] | None":
    from logdepth.decoding.few_rows import FewRowsLayer, fit

    return tuple(FewRowsLayer(layer) for layer in layers) if all(fit(layer, dtype) for layer in layers) else None


def _all_leaves(model: ScanLM, dtype: torch.dtype) -> Rows:
    parts = torch.split(model.embedding.weight, LEAVES_AT_ONCE)
    return torch.cat([model.layers[0].leaves(part).to(dtype) for part in parts])


def _cast_once(layer: ScanLayer, dtype: torch.dtype) -> ScanLayer:
    """The layer with linear weights in the dtype to which autocast would cast them at every use: the same arithmetic.

    The layer into the states keeps its own, which says what states are.
    """
    shared = {id(one): one for one in chain(layer.parameters(), layer.buffers())}
    twin = copy.deepcopy(layer, shared)
    for part in (twin.embedding_net, twin.operator, twin.out_of_state):
        for module in part.modules():
            if isinstance(module, nn.Linear):
                for name, weight in module.named_parameters(recurse=False):
                    setattr(module, name, nn.Parameter(_cast(weight, dtype), requires_grad=False))
    return twin


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    return weight if weight.dtype == torch.float64 else weight.detach().to(dtype)  # autocast leaves float64 alone
