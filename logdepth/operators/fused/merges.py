"""The merges of a program, forward and backward: those of an operator, and those of the net that may follow them.

inner = merged    result = LN(inner + W4 · act(W3 · inner + b3) + b4)
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from logdepth.operators.fused.cell import Cell, Operands, Totals, linear_and_activation, linear_and_slope
from logdepth.ops.activation_kernel import Activation, slope_programs
from logdepth.ops.column_sums import column_sums
from logdepth.ops.launch import MANY
from logdepth.ops.norm_kernel import norm_programs, residual_normed, residual_normed_backward
from logdepth.scanning.program import Call, Program

NET_SITE = 3
"""It tells the dropout of hidden layers apart."""


class NetSettings(NamedTuple):
    """What the net does, beside its weights."""

    activation: Activation
    eps: float
    dropout: float
    on_folds: bool
    """Whether it follows the merges of the down-sweep too."""


class NetWeights(NamedTuple):
    """The weights of a post-merge net. Matrix products read all but the last two."""

    hidden: Tensor
    hidden_bias: Tensor
    out: Tensor
    out_bias: Tensor
    scale: Tensor
    shift: Tensor

    @classmethod
    def of(cls, post: nn.Module) -> "NetWeights":
        linear, out, norm = (post.get_submodule(name) for name in ("hidden", "out", "norm"))
        return cls(*(one for part in (linear, out, norm) for one in (part.weight, part.bias)))  # type: ignore[arg-type]


class Net(NamedTuple):
    settings: NetSettings
    weights: NetWeights


@dataclass
class Traces:
    """What merges leave for the backward pass: a row for each merge, and for each that a net follows."""

    kept: tuple[Tensor, ...] | None
    """The operator's own, where there is to be a backward pass."""
    inner: Tensor
    net_before: Tensor
    added: Tensor

    def rows(self, first: int, count: int) -> "Traces":
        """Those of some merges."""
        part = slice(first, first + count)
        kept = None if self.kept is None else _cut(self.kept, part)
        return Traces(kept, self.inner[part], self.net_before[part], self.added[part])


class Merges:
    """A program with its weights, in the dtype of its states."""

    def __init__(
        self, program: Program, cell: Cell[Any, Any, Any], net: Net | None, states: Tensor, seed: Tensor
    ) -> None:
        self.program, self.cell, self.net, self.states, self.seed = program, cell, net, states, seed
        self.num_net_merges = 0
        if net is not None:
            self.num_net_merges = program.num_merges if net.settings.on_folds else program.num_up_merges

    def traces(self) -> Traces:
        """Room for all merges."""
        return self._traces(self.program.num_merges, self.num_net_merges)

    def forward(self, traces: Traces | None) -> None:
        """Fills the states behind the inputs; `traces` too, where they are kept."""
        for call in self.program.calls:
            results, num_with_net = self._results(self.states, call), self._num_with_net(call.first, call.num_merges)
            rows = self._net_room(num_with_net) if traces is None else traces.rows(call.first, call.num_merges)
            self.cell.forward(rows.kept, self._operands(call), rows.inner if num_with_net else results)
            if num_with_net:
                self._refine(rows, rows.net_before if traces is None else torch.empty_like(rows.net_before))
                self._add(rows, call.first, results)

    def backward(self, grads: Tensor, traces: Traces | None) -> tuple[Tensor | None, ...]:
        """Adds to `grads`, the gradients of all states, those of the inputs; returns those of the operator and the net.

        `grads` of merged states, and `traces`, are overwritten.
        """
        sums = self.cell.sums(self.states)
        net_sums = None if self.net is None else _NetSums(self.states, self.net.weights)
        for group in self.program.groups:
            first = group[-1].first
            count = group[0].first + group[0].num_merges - first
            rows = self._computed_again(first, count) if traces is None else traces.rows(first, count)
            spare, net_hidden = self.cell.spare(self.states, count), torch.empty_like(rows.net_before)
            for call in group:
                at = slice(call.first - first, call.first - first + call.num_merges)
                part, grad = rows.rows(at.start, call.num_merges), self._results(grads, call)
                if net_sums is not None and len(part.inner):
                    self._backward_of_net(call, part, net_hidden[at], grad, net_sums)
                self.cell.backward(part.kept, _cut(spare, at), self._operands(call), grad, grads, sums)
            results = self.program.num_inputs + first
            self.cell.add_products(rows.kept, spare, grads[results : results + count], sums)
            if net_sums is not None and len(net_hidden):
                net_sums.totals.add_product("hidden", rows.net_before, rows.inner)
                net_sums.totals.add_product("out", rows.added, net_hidden)
            del rows, part, spare, net_hidden  # before room is made for the next
        of_cell = self.cell.weight_grads(grads[self.program.num_inputs :], sums)
        return of_cell if net_sums is None else (*of_cell, *net_sums.weight_grads())

    def _backward_of_net(self, call: Call, rows: Traces, net_hidden: Tensor, grad: Tensor, sums: "_NetSums") -> None:
        """`grad` of results becomes that of `inner`; what `rows` held becomes its gradient, `net_hidden` is filled."""
        assert self.net is not None
        settings, weights = self.net
        residual_normed_backward(
            grad, rows.inner, rows.added, weights.scale, sums.added,
            eps=settings.eps, first=call.first, rate=settings.dropout, seed=self.seed,
        )  # fmt: skip
        linear_and_slope(
            rows.added, weights.out, rows.net_before, net_hidden, sums.before,
            activation=settings.activation, first=call.first, rate=0.0, seed=self.seed, site=NET_SITE,
        )  # fmt: skip
        grad.addmm_(rows.net_before, weights.hidden)

    def _computed_again(self, first: int, count: int) -> Traces:
        """Traces of some merges, whatever their calls: all states are known by now."""
        rows = self._traces(count, self._num_with_net(first, count))
        left, right = self.program.left[first : first + count], self.program.right[first : first + count]
        self.cell.forward(rows.kept, Operands(self.states, left, right, first), rows.inner)
        if len(rows.inner):
            self._refine(rows, torch.empty_like(rows.net_before))
        return rows

    def _refine(self, rows: Traces, net_hidden: Tensor) -> None:
        """What the net adds to `rows.inner`."""
        assert self.net is not None
        settings, weights = self.net
        linear_and_activation(
            rows.inner, weights.hidden, weights.hidden_bias, rows.net_before, net_hidden,
            activation=settings.activation, first=0, rate=0.0, seed=self.seed, site=NET_SITE,
        )  # fmt: skip
        torch.addmm(weights.out_bias, net_hidden, weights.out.t(), out=rows.added)

    def _add(self, rows: Traces, first: int, results: Tensor) -> None:
        assert self.net is not None
        settings, weights = self.net
        residual_normed(
            rows.inner, rows.added, weights.scale, weights.shift, results,
            eps=settings.eps, first=first, rate=settings.dropout, seed=self.seed,
        )  # fmt: skip

    def _num_with_net(self, first: int, count: int) -> int:
        """How many of some merges a net follows; these come first."""
        return max(0, min(count, self.num_net_merges - first))

    def _traces(self, count: int, num_with_net: int) -> Traces:
        return replace(self._net_room(num_with_net), kept=self.cell.kept(self.states, count))

    def _net_room(self, num_with_net: int) -> Traces:
        """Of the net alone."""
        width, hidden = self.states.shape[1], 0 if self.net is None else len(self.net.weights.hidden)
        inner, net_before, added = (self.states.new_empty(num_with_net, one) for one in (width, hidden, width))
        return Traces(None, inner, net_before, added)

    def _operands(self, call: Call) -> Operands:
        return Operands(self.states, call.left, call.right, call.first, call.adjacent_from)

    def _results(self, states: Tensor, call: Call) -> Tensor:
        return states[call.result : call.result + call.num_merges]


class _NetSums:
    """Partial sums over rows, for vectors of the net; and the gradients of its matrices."""

    def __init__(self, states: Tensor, weights: NetWeights) -> None:
        width, hidden, device = states.shape[1], len(weights.hidden), states.device
        self.added = torch.zeros(norm_programs(MANY, width), 3 * width, device=device)
        self.before = torch.zeros(slope_programs(MANY, hidden), hidden, device=device)
        self.totals = Totals()

    def weight_grads(self) -> tuple[Tensor | None, ...]:
        scale, shift, bias = torch.split(column_sums(self.added), self.added.shape[1] // 3)
        return self.totals.get("hidden"), column_sums(self.before), self.totals.get("out"), bias, scale, shift


def _cut(rows: Any, part: slice) -> Any:
    """Some rows of each tensor of a named tuple."""
    return type(rows)(*(one[part] for one in rows))
