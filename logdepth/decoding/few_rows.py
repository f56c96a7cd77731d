"""A layer's merges and its output for few rows, with little between the matrix products: for GRC on a GPU.

The same arithmetic as the modules', from their weights. A result stays without its LayerNorm until something reads it:
the kernel that does then normalises it, and puts it where it belongs.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from logdepth.fused import why_changed, why_not_fused
from logdepth.fused.weights import GRCWeights, NetWeights
from logdepth.kernels import DTYPES
from logdepth.kernels.activation import Activation, activate
from logdepth.kernels.few_rows import MOST_ROWS, Norm, linear, mix, settle
from logdepth.kernels.gate import gate
from logdepth.kernels.norm import residual_normed
from logdepth.models.scan_lm import ScanLayer
from logdepth.operators import GRC, PostMerge
from logdepth.operators.activation import name_of
from logdepth.scanning import Operator
from logdepth.scanning.merge import operator_pair
from logdepth.shapes import Rows


class Unsettled(NamedTuple):
    """Merged rows before their LayerNorm."""

    values: Rows
    """float32."""
    norm: Norm


def fit(layer: ScanLayer, states: torch.dtype) -> bool:
    """Whether there are kernels for a layer with states of this dtype."""
    parts = (layer.operator, layer.out_of_state)
    dtypes = {states, *(weight.dtype for part in parts for weight in part.parameters())}
    operator = layer.operator.operator if isinstance(layer.operator, PostMerge) else layer.operator
    fused = why_not_fused(layer.operators(), layer.out_of_state.weight) is None
    as_built = why_changed(layer.out_of_state, lambda: nn.Linear(1, 1)) is None
    return fused and as_built and isinstance(operator, GRC) and dtypes.issubset(DTYPES)


class FewRowsLayer:
    """A layer from its leaves to its output."""

    def __init__(self, layer: ScanLayer) -> None:
        up, down = operator_pair(layer.operators())
        self.up = FewRowsGRC(up)
        self.down = self.up if down is up else FewRowsGRC(down)
        self.weight, self.bias = layer.out_of_state.weight, layer.out_of_state.bias
        self.input_residual = layer.input_residual

    @staticmethod
    def fits(num_rows: int) -> bool:
        """Whether rows are few."""
        return 0 < num_rows <= MOST_ROWS

    def output(self, prefixes: Rows | Unsettled, settled: Tensor, inputs: Rows, looked_up: Tensor | None) -> Rows:
        """W · prefix + b + the input's share; `settled`, `[rows, width]` or `[copies, …]`: where prefixes go, or are.

        inputs: a row each, or, with `looked_up`, those of these numbers.
        """
        last, norm = _settled_for(prefixes, settled)
        dtype = torch.promote_types(self.weight.dtype, inputs.dtype)
        out = inputs.new_empty(len(last), len(self.weight), dtype=dtype)
        linear(
            [last], self.weight, self.bias, out,
            norm=norm, settled=settled, residual=inputs, looked_up=looked_up, share=self.input_residual,
        )  # fmt: skip
        return out


class FewRowsGRC:
    """Stands for a GRC, or one with a net after its merges."""

    def __init__(self, operator: Operator) -> None:
        self.net: NetWeights | None = None
        if isinstance(operator, PostMerge):
            self.net, self.net_activation = NetWeights.of(operator), name_of(operator.activation)
            self.net_norm = _norm(operator.norm)
            operator = operator.operator
        assert isinstance(operator, GRC)
        self.cell, self.activation = GRCWeights.of(operator), name_of(operator.activation)
        self.norm = _norm(operator.norm)

    def __call__(self, left: Rows, right: Rows) -> Rows:
        merged = torch.empty_like(left)
        if len(left) > MOST_ROWS:
            self._merge_many(left, right, merged)
        elif len(left):
            unsettled = self.merge(left, right, right)
            settle(unsettled.values, unsettled.norm, merged)
        return merged

    def merge(self, left: Rows, right: Rows | Unsettled, settled: Rows) -> Unsettled:
        """At most `MOST_ROWS`; `settled`: where the right operands go, or are."""
        cell, net = self.cell, self.net
        last, norm = _settled_for(right, settled)
        hidden = left.new_empty(len(left), len(cell.hidden), dtype=cell.hidden.dtype)
        linear(
            [left, last], cell.hidden, cell.hidden_bias, hidden,
            activation=self.activation, norm=norm, settled=settled,
        )  # fmt: skip
        merged = Unsettled(torch.empty_like(left, dtype=torch.float32), self.norm)
        mix(hidden, cell.gates, cell.gates_bias, left, settled, merged.values)
        if net is None:
            return merged
        inner = torch.empty_like(left)
        last, norm = _settled_for(merged, inner)
        hidden = left.new_empty(len(left), len(net.hidden), dtype=net.hidden.dtype)
        linear(
            [last], net.hidden, net.hidden_bias, hidden,
            activation=self.net_activation, norm=norm, settled=inner,
        )  # fmt: skip
        linear([hidden], net.out, net.out_bias, merged.values, residual=inner)
        return Unsettled(merged.values, self.net_norm)

    def _merge_many(self, left: Rows, right: Rows, merged: Rows) -> None:
        """By the library's matrix products, with kernels between them."""
        cell, net = self.cell, self.net
        num_rows, width = left.shape
        states = torch.stack([left, right], dim=1).view(2 * num_rows, width)
        numbers = torch.arange(2 * num_rows, dtype=torch.int32, device=left.device).view(num_rows, 2).t().contiguous()
        hidden = _product(states.view(num_rows, 2 * width), cell.hidden, cell.hidden_bias)
        self._activate(hidden, self.activation)
        gates = _product(hidden, cell.gates, cell.gates_bias)
        gate(gates, states, numbers[0], numbers[1], *self.norm, merged)
        if net is not None:
            hidden = _product(merged, net.hidden, net.hidden_bias)
            self._activate(hidden, self.net_activation)
            added = _product(hidden, net.out, net.out_bias)
            scale, shift, eps = self.net_norm
            residual_normed(merged, added, scale, shift, merged, eps=eps, first=0, rate=0.0, seed=numbers)

    def _activate(self, hidden: Rows, activation: Activation) -> None:
        activate(hidden, hidden, activation=activation, first=0, rate=0.0, seed=hidden, site=0)  # nothing is random


def _settled_for(rows: Rows | Unsettled, settled: Tensor) -> tuple[Rows, Norm | None]:
    """What a product reads of these rows: one as it is, with its norm; more of them once they are settled."""
    if isinstance(rows, Tensor):
        return rows, None
    if len(rows.values) == 1:
        return rows.values, rows.norm
    settle(rows.values, rows.norm, settled)
    return settled if settled.ndim == 2 else settled[0], None


def _product(x: Rows, weight: Tensor, bias: Tensor) -> Rows:
    return torch.addmm(bias, x.to(weight.dtype), weight.t())


def _norm(norm: nn.LayerNorm) -> Norm:
    return Norm(norm.weight, norm.bias, norm.eps)
