"""Merges of an MLP-LDRU, whose weights of operands are normalised: four matrix products with fused kernels between.

pair = [a; b]    first = W1 · pair + b1    second = W2 · act(first) + b2    raw = W3 · act(second) + b3
weighed = LN(raw) ∘ pair    merged = M · weighed + m

Two linear maps in a row are one: M = Wo · [Va Vb], m = Wo · (ba + bb) + bo. With G = Σ grad ⊗ weighed and g = Σ grad,
the gradient of [Va Vb] is Woᵀ · G, that of Wo is G · [Va Vb]ᵀ + g ⊗ (ba + bb), that of ba and bb Woᵀ · g.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from logdepth.operators.fused.cell import Cell, Operands, Totals, linear_and_activation, linear_and_slope
from logdepth.operators.fused.pairs_kernel import add_pair_gradients, gather_pairs
from logdepth.operators.mlp_ldru.weigh_kernel import weigh, weigh_backward
from logdepth.ops.activation import name_of
from logdepth.ops.activation_kernel import Activation, slope_programs
from logdepth.ops.column_sums import column_sums
from logdepth.ops.launch import MANY
from logdepth.ops.norm_kernel import norm_programs

if TYPE_CHECKING:
    from logdepth.operators.mlp_ldru.mlp_ldru import MLPLDRU


class MLPLDRUWeights(NamedTuple):
    """Matrices as `[out, in]`. Matrix products read all but the last two."""

    first: Tensor
    first_bias: Tensor
    second: Tensor
    second_bias: Tensor
    raw: Tensor
    raw_bias: Tensor
    left: Tensor
    left_bias: Tensor
    right: Tensor
    right_bias: Tensor
    out: Tensor
    out_bias: Tensor
    scale: Tensor
    shift: Tensor

    @classmethod
    def of(cls, ldru: "MLPLDRU") -> "MLPLDRUWeights":
        linears = (ldru.first, ldru.second, ldru.weights, ldru.left_value, ldru.right_value, ldru.out)
        assert isinstance(ldru.norm, nn.LayerNorm)
        modules = (*linears, ldru.norm)
        return cls(*(one for module in modules for one in (module.weight, module.bias)))


class MLPLDRUSettings(NamedTuple):
    activation: Activation
    eps: float


class Kept(NamedTuple):
    pairs: Tensor
    first: Tensor
    second: Tensor
    raw: Tensor


class Spare(NamedTuple):
    first_hidden: Tensor
    second_hidden: Tensor
    weighed: Tensor


class Sums(NamedTuple):
    """Partial sums over rows, for vectors; and the gradients of matrices."""

    first: Tensor
    second: Tensor
    norm: Tensor
    totals: Totals


class MLPLDRUCell(Cell[Kept, Spare, Sums]):
    def __init__(self, settings: MLPLDRUSettings, weights: Sequence[Tensor], seed: Tensor) -> None:
        self.settings, self.weights = settings, MLPLDRUWeights(*weights)
        low = self.weights.out.dtype
        self.out, self.values = self.weights.out.float(), torch.cat([self.weights.left, self.weights.right], 1).float()
        self.values_bias = self.weights.left_bias.float() + self.weights.right_bias.float()
        with self._in_float32():
            self.mix = (self.out @ self.values).to(low)
            self.mix_bias = torch.addmv(self.weights.out_bias.float(), self.out, self.values_bias).to(low)
        self.undropped: dict[str, Any] = {"first": 0, "rate": 0.0, "seed": seed}
        self.activation: dict[str, Any] = {"activation": settings.activation, "site": 0, **self.undropped}

    @classmethod
    def refusal(cls, operator: "MLPLDRU") -> str | None:
        normed = isinstance(operator.norm, nn.LayerNorm)
        return None if normed else "there are no fused kernels for MLPLDRU with norm_weights=False"

    @classmethod
    def settings_of(cls, operator: "MLPLDRU") -> MLPLDRUSettings:
        assert isinstance(operator.norm, nn.LayerNorm)
        return MLPLDRUSettings(name_of(operator.activation), operator.norm.eps)

    @classmethod
    def weights_of(cls, operator: "MLPLDRU") -> tuple[Tensor, ...]:
        return MLPLDRUWeights.of(operator)

    def kept(self, states: Tensor, count: int) -> Kept:
        width = states.shape[1]
        return Kept(*(states.new_empty(count, multiple * width) for multiple in (2, 2, 4, 2)))

    def spare(self, states: Tensor, count: int) -> Spare:
        width = states.shape[1]
        return Spare(*(states.new_empty(count, multiple * width) for multiple in (2, 4, 2)))

    def sums(self, states: Tensor) -> Sums:
        width, device = 2 * states.shape[1], states.device
        return Sums(
            first=torch.zeros(slope_programs(MANY, width), width, device=device),
            second=torch.zeros(slope_programs(MANY, 2 * width), 2 * width, device=device),
            norm=torch.zeros(norm_programs(MANY, width), 3 * width, device=device),
            totals=Totals(),
        )

    def forward(self, kept: Kept | None, at: Operands, merged: Tensor) -> None:
        weights, states = self.weights, at.states
        count, width = len(at.left), states.shape[1]
        pairs = None if kept is not None else at.side_by_side()
        if pairs is None:
            pairs = states.new_empty(count, 2 * width) if kept is None else kept.pairs
            gather_pairs(states, at.left, at.right, pairs, **self.undropped)
        first = states.new_empty(count, 2 * width) if kept is None else kept.first
        hidden = first if kept is None else torch.empty_like(first)
        linear_and_activation(pairs, weights.first, weights.first_bias, first, hidden, **self.activation)
        second = states.new_empty(count, 4 * width) if kept is None else kept.second
        second_hidden = second if kept is None else torch.empty_like(second)
        linear_and_activation(hidden, weights.second, weights.second_bias, second, second_hidden, **self.activation)
        raw = hidden if kept is None else kept.raw  # as wide, and read no more
        torch.addmm(weights.raw_bias, second_hidden, weights.raw.t(), out=raw)
        if some := len(merged):
            weighed = hidden[:some]
            weigh(raw[:some], pairs[:some], weights.scale, weights.shift, weighed, eps=self.settings.eps)
            torch.addmm(self.mix_bias, weighed, self.mix.t(), out=merged)

    def backward(self, kept: Kept, spare: Spare, at: Operands, grad: Tensor, grads: Tensor, sums: Sums) -> None:
        weights = self.weights
        torch.mm(grad, self.mix, out=spare.weighed)
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
        sums.totals.add_product("first", kept.first, kept.pairs)
        sums.totals.add_product("second", kept.second, spare.first_hidden)
        sums.totals.add_product("raw", kept.raw, spare.second_hidden)
        sums.totals.add_product("mix", grad, spare.weighed)

    def weight_grads(self, grad: Tensor, sums: Sums) -> tuple[Tensor | None, ...]:
        totals = sums.totals
        scale, shift, raw_bias = torch.split(column_sums(sums.norm), 2 * grad.shape[1])
        of_first = totals.get("first"), column_sums(sums.first)
        of_second = totals.get("second"), column_sums(sums.second)
        return (
            *of_first,
            *of_second,
            totals.get("raw"),
            raw_bias,
            *self._mix_grads(grad, totals.get("mix")),
            scale,
            shift,
        )

    def _mix_grads(self, grad: Tensor, mix: Tensor | None) -> tuple[Tensor | None, ...]:
        """Of left, right and out, each with its bias."""
        if mix is None:
            return (None,) * 6
        whole = column_sums(grad)
        with self._in_float32():
            left, right = (self.out.t() @ mix).chunk(2, dim=1)
            out = torch.addmm(torch.outer(whole, self.values_bias), mix, self.values.t())
            bias = self.out.t() @ whole
        return left, bias, right, bias.clone(), out, whole

    def _in_float32(self) -> torch.autocast:
        """Products of weights, few and small, are not to be rounded on the way."""
        return torch.autocast(self.out.device.type, enabled=False)
