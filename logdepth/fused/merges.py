"""The merges of a program, forward and backward: large matrix products with fused kernels between them.

    pair = [a; b]    before = W1 · pair + b1    hidden = act(before)
    gates = W2 · hidden + b2    merged = gate(gates, a, b)

and, where a net follows a merge,   inner = merged    result = LN(inner + W4 · act(W3 · inner + b3) + b4)
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from logdepth.fused.products import linear_and_activation, linear_and_slope, linear_map
from logdepth.fused.program import Call, Program
from logdepth.fused.weights import Cell, Net, Settings, add_product
from logdepth.kernels.activation import slope_programs
from logdepth.kernels.column_sums import column_sums
from logdepth.kernels.gate import gate, gate_backward
from logdepth.kernels.launch import MAX_PROGRAMS
from logdepth.kernels.norm import norm_programs, residual_normed, residual_normed_backward
from logdepth.kernels.pairs import add_pair_gradients, gather_pairs

HIDDEN_SITE, NET_SITE = 2, 3
"""They tell the dropout of the two hidden layers apart."""
MANY = 2**30
"""Rows, for as many partial sums as there may be."""


@dataclass
class Traces:
    """What merges leave for the backward pass: a row for each merge, and for each that a net follows."""

    pairs: Tensor
    before: Tensor
    gates: Tensor
    inner: Tensor
    net_before: Tensor
    added: Tensor

    @classmethod
    def empty(cls, states: Tensor, net: Net | None, num_merges: int, num_net_merges: int) -> "Traces":
        width = states.shape[1]
        net_hidden = 0 if net is None else len(net.hidden)
        return cls(
            pairs=states.new_empty(num_merges, 2 * width),
            before=states.new_empty(num_merges, 4 * width),
            gates=states.new_empty(num_merges, 4 * width),
            inner=states.new_empty(num_net_merges, width),
            net_before=states.new_empty(num_net_merges, net_hidden),
            added=states.new_empty(num_net_merges, width),
        )

    def rows(self, first: int, count: int) -> "Traces":
        """Those of some merges."""
        part = slice(first, first + count)
        return Traces(
            self.pairs[part],
            self.before[part],
            self.gates[part],
            self.inner[part],
            self.net_before[part],
            self.added[part],
        )


class Merges:
    """A program with its weights, in the dtype of its states."""

    def __init__(
        self, settings: Settings, program: Program, cell: Cell, net: Net | None, states: Tensor, seed: Tensor
    ) -> None:
        self.settings, self.program, self.states, self.seed = settings, program, states, seed
        self.cell, self.net = cell, net
        self.num_net_merges = 0
        if net is not None:
            self.num_net_merges = program.num_merges if settings.net_on_folds else program.num_up_merges

    def forward(self, traces: Traces | None) -> None:
        """Fills the states behind the inputs; `traces` too, where they are kept."""
        for call in self.program.calls:
            if traces is None:
                rows = self._traces(call.num_merges, self._num_with_net(call.first, call.num_merges))
                self._gates(rows, call.first, call.left, call.right, rows.before, call.side_by_side)
            else:
                rows = traces.rows(call.first, call.num_merges)
                self._gates(rows, call.first, call.left, call.right, torch.empty_like(rows.before), None)
            results = self._results(self.states, call)
            if self._num_with_net(call.first, call.num_merges):
                self._merge(rows.gates, call.left, call.right, rows.inner)
                self._refine(rows, rows.net_before if traces is None else torch.empty_like(rows.net_before))
                self._add(rows, call.first, results)
            else:
                self._merge(rows.gates, call.left, call.right, results)

    def backward(self, grads: Tensor, traces: Traces | None) -> tuple[Tensor | None, ...]:
        """Adds to `grads`, the gradients of all states, those of the inputs; returns those of cell and net.

        `grads` of merged states, and `traces`, are overwritten.
        """
        sums = _Sums(self.states, self.net)
        totals: dict[str, Tensor] = {}
        for group in self.program.groups:
            first = group[-1].first
            count = group[0].first + group[0].num_merges - first
            if traces is None:
                rows, hidden, net_hidden = self._computed_again(first, count)
            else:
                rows = traces.rows(first, count)
                hidden, net_hidden = torch.empty_like(rows.before), torch.empty_like(rows.net_before)
            for call in group:
                at = slice(call.first - first, call.first - first + call.num_merges)
                part = rows.rows(at.start, call.num_merges)
                self._backward_of_call(call, part, hidden[at], net_hidden[at], grads, sums)
            add_product(totals, "hidden", rows.before, rows.pairs)
            add_product(totals, "gates", rows.gates, hidden)
            if len(net_hidden):
                add_product(totals, "net_hidden", rows.net_before, rows.inner)
                add_product(totals, "net_out", rows.added, net_hidden)
        of_cell = (totals.get("hidden"), column_sums(sums.before), totals.get("gates"), *sums.of_gates())
        if self.net is None:
            return of_cell
        of_net = (totals.get("net_hidden"), column_sums(sums.net_before), totals.get("net_out"), *sums.of_net())
        return of_cell + of_net

    def _backward_of_call(
        self, call: Call, rows: Traces, hidden: Tensor, net_hidden: Tensor, grads: Tensor, sums: "_Sums"
    ) -> None:
        """From gradients of results to those of operands; what `rows` held becomes its gradient, `hidden` is filled."""
        settings, cell, net = self.settings, self.cell, self.net
        grad = self._results(grads, call)
        if net is not None and len(net_hidden):
            residual_normed_backward(
                grad, rows.inner, rows.added, net.scale, sums.net,
                eps=settings.net_eps, first=call.first, rate=settings.net_dropout, seed=self.seed,
            )  # fmt: skip
            linear_and_slope(
                rows.added, net.out, rows.net_before, net_hidden, sums.net_before,
                activation=settings.net_activation, first=call.first, rate=0.0, seed=self.seed, site=NET_SITE,
            )  # fmt: skip
            grad.addmm_(rows.net_before, net.hidden)
        gate_backward(grad, rows.gates, self.states, call.left, call.right, cell.scale, settings.eps, grads, sums.gates)
        linear_and_slope(
            rows.gates, cell.gates, rows.before, hidden, sums.before,
            activation=settings.activation, first=call.first, rate=settings.dropout, seed=self.seed, site=HIDDEN_SITE,
        )  # fmt: skip
        pair_grads = rows.before @ cell.hidden
        add_pair_gradients(
            grads, call.left, call.right, pair_grads, first=call.first, rate=settings.dropout, seed=self.seed
        )

    def _computed_again(self, first: int, count: int) -> tuple[Traces, Tensor, Tensor]:
        """Traces and hidden layers of some merges, whatever their calls: all states are known by now."""
        rows = self._traces(count, self._num_with_net(first, count))
        left, right = self.program.left[first : first + count], self.program.right[first : first + count]
        hidden, net_hidden = torch.empty_like(rows.before), torch.empty_like(rows.net_before)
        self._gates(rows, first, left, right, hidden, None)
        if len(net_hidden):
            with_net = slice(len(net_hidden))
            self._merge(rows.gates, left[with_net], right[with_net], rows.inner)
            self._refine(rows, net_hidden)
        return rows, hidden, net_hidden

    def _gates(
        self, rows: Traces, first: int, left: Tensor, right: Tensor, hidden: Tensor, side_by_side: int | None
    ) -> None:
        """Fills pairs, before and gates; `hidden` may be `rows.before` where that is not kept."""
        settings, cell = self.settings, self.cell
        if side_by_side is not None and not settings.dropout:
            rows.pairs = self.states[side_by_side : side_by_side + 2 * len(left)].view(len(left), -1)
        else:
            gather_pairs(self.states, left, right, rows.pairs, first=first, rate=settings.dropout, seed=self.seed)
        linear_and_activation(
            rows.pairs, cell.hidden, cell.hidden_bias, rows.before, hidden,
            activation=settings.activation, first=first, rate=settings.dropout, seed=self.seed, site=HIDDEN_SITE,
        )  # fmt: skip
        linear_map(hidden, cell.gates, cell.gates_bias, rows.gates)

    def _merge(self, gates: Tensor, left: Tensor, right: Tensor, merged: Tensor) -> None:
        cell = self.cell
        gate(gates, self.states, left, right, cell.scale, cell.shift, self.settings.eps, merged)

    def _refine(self, rows: Traces, net_hidden: Tensor) -> None:
        """What the net adds to `rows.inner`."""
        net, settings = self.net, self.settings
        assert net is not None
        linear_and_activation(
            rows.inner, net.hidden, net.hidden_bias, rows.net_before, net_hidden,
            activation=settings.net_activation, first=0, rate=0.0, seed=self.seed, site=NET_SITE,
        )  # fmt: skip
        linear_map(net_hidden, net.out, net.out_bias, rows.added)

    def _add(self, rows: Traces, first: int, results: Tensor) -> None:
        net, settings = self.net, self.settings
        assert net is not None
        residual_normed(
            rows.inner, rows.added, net.scale, net.shift, results,
            eps=settings.net_eps, first=first, rate=settings.net_dropout, seed=self.seed,
        )  # fmt: skip

    def _num_with_net(self, first: int, count: int) -> int:
        """How many of some merges a net follows; these come first."""
        return max(0, min(count, self.num_net_merges - first))

    def _traces(self, count: int, num_with_net: int) -> Traces:
        return Traces.empty(self.states, self.net, count, num_with_net)

    def _results(self, states: Tensor, call: Call) -> Tensor:
        return states[call.result : call.result + call.num_merges]


class _Sums:
    """Partial sums over rows, for the gradients of vectors."""

    def __init__(self, states: Tensor, net: Net | None) -> None:
        def zeros(num_programs: int, count: int) -> Tensor:
            return torch.zeros(num_programs, count, device=states.device)

        self.width = states.shape[1]
        hidden = 4 * self.width
        self.gates, self.before = zeros(MAX_PROGRAMS, 6 * self.width), zeros(slope_programs(MANY, hidden), hidden)
        self.net = self.net_before = zeros(0, 0)
        if net is not None:
            net_hidden = len(net.hidden)
            self.net = zeros(norm_programs(MANY, self.width), 3 * self.width)
            self.net_before = zeros(slope_programs(MANY, net_hidden), net_hidden)

    def of_gates(self) -> tuple[Tensor, ...]:
        """Gradients of the gates' bias, and of the norm's scale and shift."""
        return torch.split(column_sums(self.gates), [4 * self.width, self.width, self.width])

    def of_net(self) -> tuple[Tensor, ...]:
        """Gradients of the bias of what the net adds, and of its norm's scale and shift."""
        scale, shift, bias = torch.split(column_sums(self.net), self.width)
        return bias, scale, shift
