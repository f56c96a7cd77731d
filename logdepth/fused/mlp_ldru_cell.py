"""Merges of an MLP-LDRU, whose weights of operands are normalised: five matrix products with fused kernels between.

pair = [a; b]    first = W1 · pair + b1    second = W2 · act(first) + b2    raw = W3 · act(second) + b3
weighed = LN(raw) ∘ pair    mixed = [Va Vb] · weighed + (ba + bb)    merged = Wo · mixed + bo
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from logdepth.fused.cell import Cell, Operands
from logdepth.fused.products import linear_and_activation, linear_and_slope, linear_map
from logdepth.fused.weights import MLPLDRUWeights, Totals
from logdepth.kernels.activation import Activation, slope_programs
from logdepth.kernels.column_sums import column_sums
from logdepth.kernels.launch import MANY
from logdepth.kernels.norm import norm_programs
from logdepth.kernels.pairs import add_pair_gradients, gather_pairs
from logdepth.kernels.weigh import weigh, weigh_backward
from logdepth.operators import MLPLDRU
from logdepth.operators.activation import name_of


class MLPLDRUSettings(NamedTuple):
    activation: Activation
    eps: float


class Kept(NamedTuple):
    pairs: Tensor
    first: Tensor
    second: Tensor
    raw: Tensor
    mixed: Tensor


class Spare(NamedTuple):
    first_hidden: Tensor
    second_hidden: Tensor
    weighed: Tensor
    mixed_grad: Tensor


class Sums(NamedTuple):
    """Partial sums over rows, for vectors; and the gradients of matrices, and of vectors that nothing else sums."""

    first: Tensor
    second: Tensor
    norm: Tensor
    totals: Totals


class MLPLDRUCell(Cell[Kept, Spare, Sums]):
    num_weights, num_of_products = 14, 12

    def __init__(self, settings: MLPLDRUSettings, weights: Sequence[Tensor], seed: Tensor) -> None:
        self.settings, self.weights = settings, MLPLDRUWeights(*weights)
        self.values = torch.cat([self.weights.left_value, self.weights.right_value], dim=1)
        self.values_bias = self.weights.left_bias + self.weights.right_bias
        # Hidden layers are not dropped, so nobody reads the seed.
        self.activation: dict[str, Any] = {
            "activation": settings.activation, "first": 0, "rate": 0.0, "seed": seed, "site": 0,
        }  # fmt: skip
        self.undropped: dict[str, Any] = {"first": 0, "rate": 0.0, "seed": seed}

    @classmethod
    def refusal(cls, operator: MLPLDRU) -> str | None:
        normed = isinstance(operator.norm, nn.LayerNorm)
        return None if normed else "there are no fused kernels for an MLP-LDRU with norm_weights=False"

    @classmethod
    def settings_of(cls, operator: MLPLDRU) -> MLPLDRUSettings:
        assert isinstance(operator.norm, nn.LayerNorm)
        return MLPLDRUSettings(name_of(operator.activation), operator.norm.eps)

    @classmethod
    def weights_of(cls, operator: MLPLDRU) -> tuple[Tensor, ...]:
        return MLPLDRUWeights.of(operator)

    def kept(self, states: Tensor, count: int) -> Kept:
        width = states.shape[1]
        return Kept(*(states.new_empty(count, multiple * width) for multiple in (2, 2, 4, 2, 1)))

    def spare(self, states: Tensor, count: int) -> Spare:
        width = states.shape[1]
        return Spare(*(states.new_empty(count, multiple * width) for multiple in (2, 4, 2, 1)))

    def sums(self, states: Tensor) -> Sums:
        width, device = 2 * states.shape[1], states.device
        return Sums(
            first=torch.zeros(slope_programs(MANY, width), width, device=device),
            second=torch.zeros(slope_programs(MANY, 2 * width), 2 * width, device=device),
            norm=torch.zeros(norm_programs(MANY, width), 3 * width, device=device),
            totals=Totals(),
        )

    def forward(self, kept: Kept, spare: Spare | None, at: Operands, merged: Tensor) -> None:
        weights, pairs = self.weights, kept.pairs
        if spare is None and at.side_by_side is not None:
            pairs = at.states[at.side_by_side : at.side_by_side + 2 * len(at.left)].view(len(at.left), -1)
        else:
            gather_pairs(at.states, at.left, at.right, pairs, **self.undropped)
        first_hidden = kept.first if spare is None else spare.first_hidden
        second_hidden = kept.second if spare is None else spare.second_hidden
        weighed = kept.raw if spare is None else spare.weighed
        linear_and_activation(pairs, weights.first, weights.first_bias, kept.first, first_hidden, **self.activation)
        linear_and_activation(
            first_hidden, weights.second, weights.second_bias, kept.second, second_hidden, **self.activation
        )
        linear_map(second_hidden, weights.raw, weights.raw_bias, kept.raw)
        weigh(kept.raw, pairs, weights.scale, weights.shift, weighed, eps=self.settings.eps)
        linear_map(weighed, self.values, self.values_bias, kept.mixed)
        if count := len(merged):
            linear_map(kept.mixed[:count], weights.out, weights.out_bias, merged)

    def backward(self, kept: Kept, spare: Spare, at: Operands, grad: Tensor, grads: Tensor, sums: Sums) -> None:
        weights = self.weights
        torch.mm(grad, weights.out, out=spare.mixed_grad)
        torch.mm(spare.mixed_grad, self.values, out=spare.weighed)
        pair_grads = torch.empty_like(kept.pairs)
        weigh_backward(
            spare.weighed, kept.raw, kept.pairs, weights.scale, weights.shift, pair_grads, sums.norm,
            eps=self.settings.eps,
        )  # fmt: skip
        linear_and_slope(kept.raw, weights.raw, kept.second, spare.second_hidden, sums.second, **self.activation)
        linear_and_slope(kept.second, weights.second, kept.first, spare.first_hidden, sums.first, **self.activation)
        pair_grads.addmm_(kept.first, weights.first)
        add_pair_gradients(grads, at.left, at.right, pair_grads, **self.undropped)

    def add_products(self, kept: Kept, spare: Spare, grad: Tensor, sums: Sums) -> None:
        totals = sums.totals
        totals.add_product("first", kept.first, kept.pairs)
        totals.add_product("second", kept.second, spare.first_hidden)
        totals.add_product("raw", kept.raw, spare.second_hidden)
        totals.add_product("values", spare.mixed_grad, spare.weighed)
        totals.add("values_bias", column_sums(spare.mixed_grad))
        totals.add_product("out", grad, kept.mixed)
        totals.add("out_bias", column_sums(grad))

    def weight_grads(self, sums: Sums) -> tuple[Tensor | None, ...]:
        totals = sums.totals
        scale, shift, raw_bias = torch.split(column_sums(sums.norm), sums.norm.shape[1] // 3)
        values, values_bias = totals.get("values"), totals.get("values_bias")
        left, right = (None, None) if values is None else values.chunk(2, dim=1)
        of_first = totals.get("first"), column_sums(sums.first)
        of_second = totals.get("second"), column_sums(sums.second)
        of_values = left, values_bias, right, None if values_bias is None else values_bias.clone()
        of_out = totals.get("out"), totals.get("out_bias")
        return *of_first, *of_second, totals.get("raw"), raw_bias, *of_values, *of_out, scale, shift
