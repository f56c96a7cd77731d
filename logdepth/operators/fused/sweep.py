"""A scan as one node of the graph: kernels sweep a whole plan, forward and backward."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from logdepth.operators.fused.cell import Cell
from logdepth.operators.fused.merges import Merges, Net, NetSettings, NetWeights
from logdepth.operators.fused.operator import FusedOperator
from logdepth.ops.activation import name_of
from logdepth.ops.dispatch import backward_by_kernels, on_device_of
from logdepth.ops.dropout import draw_seed, drops, rate_of
from logdepth.ops.lookup_kernel import look_up
from logdepth.ops.precision import Casts, cast, has_casts, product_dtype, using_casts
from logdepth.ops.rows_kernel import scatter_rows
from logdepth.scanning.plan import Plan
from logdepth.scanning.program import Program, program_of
from logdepth.scanning.sweep import Swept


class Settings(NamedTuple):
    """What a scan computes, besides its weights."""

    cell: type[Cell[Any, Any, Any]]
    cell_settings: Any
    num_cell_weights: int
    """How many of the weights belong to the operator; they come first."""
    net: NetSettings | None
    drops: bool
    """Whether any dropout is active."""
    dtype: torch.dtype
    """The dtype of states and matrix products."""
    recompute: bool
    """Whether the backward pass computes again what it needs, instead of keeping it."""


def fused_sweep(
    operator: FusedOperator,
    net: nn.Module | None,
    net_on_folds: bool,
    plan: Plan,
    elements: Tensor,
    blocks: Tensor,
    prefixes: Tensor,
    edges: Tensor,
    *,
    checkpoint: bool,
) -> Swept:
    """What `scanning.sweep` computes with the operator and the net after its merges; `checkpoint` keeps less memory."""
    program = program_of(plan, len(edges), elements.device)
    cell = operator.cell()
    cell_weights = cell.weights_of(operator)
    net_weights: tuple[Tensor, ...] = () if net is None else NetWeights.of(net)
    weights = (*cell_weights, *net_weights)
    settings = Settings(
        cell=cell,
        cell_settings=cell.settings_of(operator),
        num_cell_weights=len(cell_weights),
        net=None if net is None else _net_settings(net, net_on_folds),
        drops=drops(operator) or (net is not None and drops(net)),
        dtype=product_dtype(elements),
        recompute=checkpoint,
    )
    inputs = (elements, blocks, prefixes, edges, *weights)
    # Asked here: inside a Function gradients are always off.
    learns = torch.is_grad_enabled() and any(one.requires_grad for one in inputs)
    with on_device_of(elements):
        low = (*_in_product_dtype(cell_weights, settings.dtype), *_in_product_dtype(net_weights, settings.dtype))
        outputs, new_blocks, new_prefixes = _FusedScan.apply(  # type: ignore[no-untyped-call]
            settings, program, learns, low, *inputs
        )
    return Swept(outputs, [new_blocks], [new_prefixes])


def _net_settings(net: Any, on_folds: bool) -> NetSettings:
    return NetSettings(name_of(net.activation), net.norm.eps, rate_of(net.dropout), on_folds)


def _in_product_dtype(weights: tuple[Tensor, ...], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Products read their weights in `dtype`; norms read the last two as they are."""
    casts = None if has_casts(dtype) else Casts(weights[:-2], dtype)
    if casts is None:
        return *(cast(one, dtype) for one in weights[:-2]), *weights[-2:]
    with using_casts(casts):
        return *(cast(one, dtype) for one in weights[:-2]), *weights[-2:]


class _FusedScan(torch.autograd.Function):
    """Returns the states of all prefixes, and the tables of the new state."""

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
        seed = draw_seed(elements.device) if settings.drops else program.outputs  # not read where nothing is dropped
        merges = _merges(settings, program, low, states, seed)
        traces = merges.traces() if learns and not settings.recompute else None
        merges.forward(traces)
        if learns:
            ctx.settings, ctx.program, ctx.traces = settings, program, traces
            ctx.dtypes = [one.dtype for one in inputs]
            ctx.sizes = [len(one) for one in inputs]
            ctx.save_for_backward(states, seed, *low)
            ctx.set_materialize_grads(False)
        outputs, blocks, prefixes = (
            _rows(states, rows, elements.dtype)  # a scan's results have the dtype of its elements
            for rows in (program.outputs, program.blocks, program.prefixes)
        )
        return outputs, blocks, prefixes

    @staticmethod
    @backward_by_kernels
    def backward(ctx: Any, *result_grads: Tensor | None) -> tuple[Tensor | None, ...]:
        states, seed, *low = ctx.saved_tensors
        program: Program = ctx.program
        grads = torch.zeros_like(states)
        result_rows = (program.outputs, program.blocks, program.prefixes)
        fresh = True
        for rows, grad in zip(result_rows, result_grads, strict=True):
            if grad is not None:
                # No row comes twice: a sum without atomics.
                grad = grad.to(grads.dtype)
                scatter_rows(grads, rows, grad.contiguous() if fresh else grads.index_select(0, rows) + grad)
                fresh = False
        merges = _merges(ctx.settings, program, low, states, seed)
        traces, ctx.traces = ctx.traces, None  # overwritten: they cannot serve twice, not even where this fails
        weight_grads = merges.backward(grads, traces)
        inputs = torch.split(grads[: program.num_inputs], ctx.sizes)
        # Nothing for inputs without rows: autograd would make zeros of the size of what they were cut from.
        input_grads = (one.to(dtype) if len(one) else None for one, dtype in zip(inputs, ctx.dtypes, strict=True))
        return None, None, None, None, *input_grads, *weight_grads


def _rows(states: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    out = states.new_empty(len(rows), states.shape[1], dtype=dtype)
    look_up(states, rows, out)
    return out


def _merges(settings: Settings, program: Program, low: Sequence[Tensor], states: Tensor, seed: Tensor) -> Merges:
    cell = settings.cell(settings.cell_settings, low[: settings.num_cell_weights], seed)
    net = None if settings.net is None else Net(settings.net, NetWeights(*low[settings.num_cell_weights :]))
    return Merges(program, cell, net, states, seed)
