"""Merges of a GRC: two matrix products with fused kernels around them.

pair = [a; b]    before = W1 · pair + b1    hidden = act(before)
gates = W2 · hidden + b2    merged = gate(gates, a, b)
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from logdepth.operators.fused.cell import Cell, Operands, Totals, linear_and_activation, linear_and_slope
from logdepth.operators.fused.pairs_kernel import add_pair_gradients, gather_pairs
from logdepth.operators.grc.gate_kernel import gate, gate_backward
from logdepth.ops.activation import name_of
from logdepth.ops.activation_kernel import Activation, slope_programs
from logdepth.ops.column_sums import column_sums
from logdepth.ops.dropout import rate_of
from logdepth.ops.launch import MANY, MAX_PROGRAMS

if TYPE_CHECKING:
    from logdepth.operators.grc.grc import GRC

HIDDEN_SITE = 2
"""It tells the dropout of hidden layers apart."""


class GRCWeights(NamedTuple):
    """Matrices as `[out, in]`. Matrix products read all but the last two."""

    hidden: Tensor
    hidden_bias: Tensor
    gates: Tensor
    gates_bias: Tensor
    scale: Tensor
    shift: Tensor

    @classmethod
    def of(cls, grc: "GRC") -> "GRCWeights":
        linear, gates, norm = grc.hidden, grc.gates, grc.norm
        return cls(linear.weight, linear.bias, gates.weight, gates.bias, norm.weight, norm.bias)


class GRCSettings(NamedTuple):
    activation: Activation
    eps: float
    dropout: float
    """Of pairs and hidden layers."""


class Kept(NamedTuple):
    pairs: Tensor
    before: Tensor
    gates: Tensor


class Spare(NamedTuple):
    hidden: Tensor


class Sums(NamedTuple):
    """Partial sums over rows, for vectors; and the gradients of matrices."""

    gates: Tensor
    before: Tensor
    totals: Totals


class GRCCell(Cell[Kept, Spare, Sums]):
    def __init__(self, settings: GRCSettings, weights: Sequence[Tensor], seed: Tensor) -> None:
        self.settings, self.weights, self.seed = settings, GRCWeights(*weights), seed

    @classmethod
    def refusal(cls, operator: "GRC") -> str | None:  # noqa: ARG003  (there are kernels for each)
        return None

    @classmethod
    def settings_of(cls, operator: "GRC") -> GRCSettings:
        return GRCSettings(name_of(operator.activation), operator.norm.eps, rate_of(operator.dropout))

    @classmethod
    def weights_of(cls, operator: "GRC") -> tuple[Tensor, ...]:
        return GRCWeights.of(operator)

    def kept(self, states: Tensor, count: int) -> Kept:
        width = states.shape[1]
        return Kept(*(states.new_empty(count, multiple * width) for multiple in (2, 4, 4)))

    def spare(self, states: Tensor, count: int) -> Spare:
        return Spare(states.new_empty(count, 4 * states.shape[1]))

    def sums(self, states: Tensor) -> Sums:
        width, device = states.shape[1], states.device
        gates = torch.zeros(MAX_PROGRAMS, 6 * width, device=device)
        before = torch.zeros(slope_programs(MANY, 4 * width), 4 * width, device=device)
        return Sums(gates, before, Totals())

    def forward(self, kept: Kept | None, at: Operands, merged: Tensor) -> None:
        settings, weights, states = self.settings, self.weights, at.states
        count, width = len(at.left), states.shape[1]
        pairs = None if kept is not None or settings.dropout else at.side_by_side()
        if pairs is None:
            pairs = states.new_empty(count, 2 * width) if kept is None else kept.pairs
            gather_pairs(states, at.left, at.right, pairs, first=at.first, rate=settings.dropout, seed=self.seed)
        before = states.new_empty(count, 4 * width) if kept is None else kept.before
        hidden = before if kept is None else torch.empty_like(before)
        linear_and_activation(
            pairs, weights.hidden, weights.hidden_bias, before, hidden,
            activation=settings.activation, first=at.first, rate=settings.dropout, seed=self.seed, site=HIDDEN_SITE,
        )  # fmt: skip
        gates = states.new_empty(count, 4 * width) if kept is None else kept.gates
        torch.addmm(weights.gates_bias, hidden, weights.gates.t(), out=gates)
        if some := len(merged):
            left, right = at.left[:some], at.right[:some]
            gate(gates[:some], states, left, right, weights.scale, weights.shift, settings.eps, merged)

    def backward(self, kept: Kept, spare: Spare, at: Operands, grad: Tensor, grads: Tensor, sums: Sums) -> None:
        settings, weights = self.settings, self.weights
        gate_backward(grad, kept.gates, at.states, at.left, at.right, weights.scale, settings.eps, grads, sums.gates)
        linear_and_slope(
            kept.gates, weights.gates, kept.before, spare.hidden, sums.before,
            activation=settings.activation, first=at.first, rate=settings.dropout, seed=self.seed, site=HIDDEN_SITE,
        )  # fmt: skip
        pair_grads = kept.before @ weights.hidden
        add_pair_gradients(grads, at.left, at.right, pair_grads, first=at.first, rate=settings.dropout, seed=self.seed)

    def add_products(self, kept: Kept, spare: Spare, grad: Tensor, sums: Sums) -> None:  # noqa: ARG002
        sums.totals.add_product("hidden", kept.before, kept.pairs)
        sums.totals.add_product("gates", kept.gates, spare.hidden)

    def weight_grads(self, grad: Tensor, sums: Sums) -> tuple[Tensor | None, ...]:
        width = grad.shape[1]
        gates_bias, scale, shift = torch.split(column_sums(sums.gates), [4 * width, width, width])
        hidden, gates = sums.totals.get("hidden"), sums.totals.get("gates")
        return hidden, column_sums(sums.before), gates, gates_bias, scale, shift
