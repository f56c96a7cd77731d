"""FusedGRC: a GRC and the net after its merges, as an operator that sweeps by itself."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from logdepth.fused.casts import Casts, arithmetic_dtype
from logdepth.fused.merges import Merges, Traces
from logdepth.fused.program import Program, program_of
from logdepth.fused.weights import Cell, Net, Settings
from logdepth.kernels import DTYPES, launched_where, usable_on
from logdepth.kernels.dropout import draw_seed, rate_of
from logdepth.kernels.rows import scatter_rows
from logdepth.operators import GRC, PostMerge
from logdepth.operators.activation import name_of
from logdepth.scanning import Operator, OperatorPair
from logdepth.scanning.plan import Plan
from logdepth.scanning.sweep import OwnSweep, Swept


def why_not_fused(operator: Operator | OperatorPair, weight: Tensor) -> str | None:
    """None where `FusedGRC` can stand for the operator with weights like this one; else the reason."""
    up, down = operator if isinstance(operator, tuple) else (operator, operator)
    cell = up.operator if type(up) is PostMerge else up
    # What was made from these classes may compute something else.
    if type(cell) is not GRC or (down is not up and down is not cell):
        return f"there are fused kernels for GRC alone; this is {type(cell).__name__}"
    if weight.dtype not in DTYPES:
        return f"fused kernels compute in float32 at most; weights are {weight.dtype}"
    kind = weight.device.type
    return None if usable_on(weight.device) else f"fused kernels need a CUDA GPU and Triton; this is the {kind}"


class FusedGRC(OwnSweep):
    """Stands for a GRC, alone or with a net after its merges, in `scan`; the weights stay the modules' own."""

    def __init__(self, operator: Operator | OperatorPair, casts: Casts | None = None) -> None:
        up, down = operator if isinstance(operator, tuple) else (operator, operator)
        self.post = up if isinstance(up, PostMerge) else None
        cell = up.operator if isinstance(up, PostMerge) else up
        if not isinstance(cell, GRC):
            raise TypeError(f"FusedGRC stands for a GRC, alone or with a net after it; got {type(cell).__name__}")
        self.grc = cell
        self.net_on_folds = down is self.post
        self.width = cell.width
        self.casts = casts
        """Copies of the weights in the dtype of the products, where they are at hand."""

    def sweep(
        self, plan: Plan, elements: Tensor, blocks: Tensor, prefixes: Tensor, edges: Tensor, checkpoint: bool
    ) -> Swept:
        if not usable_on(elements.device):
            raise ValueError(f"fused kernels need a CUDA GPU and Triton; elements are on the {elements.device.type}")
        program = program_of(plan, len(edges), elements.device)
        post, settings = self.post, self._settings(elements, checkpoint)
        cell, net = Cell.of(self.grc), () if post is None else Net.of(post)
        weights = (*cell, *net)
        casts = self.casts or Casts(weights, settings.dtype)
        # What products read in their dtype; norms read theirs as they are.
        low = (*(casts[one] for one in cell[:4]), *cell[4:], *(casts[one] for one in net[:4]), *net[4:])
        inputs = (elements, blocks, prefixes, edges, *weights)
        # Asked here: what is inside a Function knows nothing of torch.no_grad.
        learns = torch.is_grad_enabled() and any(one.requires_grad for one in inputs)
        with launched_where(elements):
            outputs, new_blocks, new_prefixes = _FusedScan.apply(  # type: ignore[no-untyped-call]
                settings, program, learns, low, *inputs
            )
        return Swept(outputs, [new_blocks], [new_prefixes])

    def _settings(self, elements: Tensor, recompute: bool) -> Settings:
        post = self.post
        return Settings(
            activation=name_of(self.grc.activation),
            eps=self.grc.norm.eps,
            dropout=rate_of(self.grc.dropout),
            net_activation="silu" if post is None else name_of(post.activation),
            net_eps=0.0 if post is None else post.norm.eps,
            net_dropout=0.0 if post is None else rate_of(post.dropout),
            net_on_folds=self.net_on_folds,
            dtype=arithmetic_dtype(elements),
            recompute=recompute,
        )


class _FusedScan(torch.autograd.Function):
    """A scan as one node of the graph: the states of all prefixes, and the tables of the new state."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: Settings,
        program: Program,
        learns: bool,
        low: tuple[Tensor, ...],
        elements: Tensor,
        blocks: Tensor,
        prefixes: Tensor,
        edges: Tensor,
        *_weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = (elements, blocks, prefixes, edges)
        states = elements.new_empty(program.num_states, elements.shape[1], dtype=settings.dtype)
        torch.cat([one.to(settings.dtype) for one in inputs], out=states[: program.num_inputs])
        drops = settings.dropout > 0 or settings.net_dropout > 0
        seed = draw_seed(elements.device) if drops else program.outputs  # nobody reads it where nothing is dropped
        merges = _merges(settings, program, low, states, seed)
        traces = None
        if learns and not settings.recompute:
            traces = Traces.empty(states, merges.net, program.num_merges, merges.num_net_merges)
        merges.forward(traces)
        if learns:
            ctx.settings, ctx.program, ctx.traces = settings, program, traces
            ctx.dtypes = [one.dtype for one in inputs]
            ctx.sizes = [len(one) for one in inputs]
            ctx.save_for_backward(states, merges.seed, *low)
            ctx.set_materialize_grads(False)
        dtype = elements.dtype
        blocks, prefixes = (states.index_select(0, rows).to(dtype) for rows in (program.blocks, program.prefixes))
        return states.index_select(0, program.outputs), blocks, prefixes

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads_of_results: Tensor | None) -> tuple[Tensor | None, ...]:
        states, seed, *low = ctx.saved_tensors
        program: Program = ctx.program
        grads = torch.zeros_like(states)
        rows_of_results = (program.outputs, program.blocks, program.prefixes)
        fresh = True
        for rows, grad in zip(rows_of_results, grads_of_results, strict=True):
            if grad is not None:
                # No row comes twice: a sum without atomics.
                grad = grad.to(grads.dtype)
                scatter_rows(grads, rows, grad.contiguous() if fresh else grads.index_select(0, rows) + grad)
                fresh = False
        merges = _merges(ctx.settings, program, low, states, seed)
        weight_grads = merges.backward(grads, ctx.traces)
        ctx.traces = None  # overwritten: it cannot serve twice
        inputs = torch.split(grads[: program.num_inputs], ctx.sizes)
        # Nothing for inputs without rows: autograd would make zeros of the size of what they were cut from.
        input_grads = (one.to(dtype) if len(one) else None for one, dtype in zip(inputs, ctx.dtypes, strict=True))
        return None, None, None, None, *input_grads, *weight_grads


def _merges(settings: Settings, program: Program, low: Sequence[Tensor], states: Tensor, seed: Tensor) -> Merges:
    return Merges(settings, program, Cell(*low[:6]), Net(*low[6:]) if low[6:] else None, states, seed)
