"""FusedOperator: an operator and the net after its merges, which sweeps by itself."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from logdepth.capture import for_replays
from logdepth.fused.as_built import why_changed
from logdepth.fused.casts import Casts, arithmetic_dtype
from logdepth.fused.cell import Cell
from logdepth.fused.grc_cell import GRCCell
from logdepth.fused.in_place import InPlace, in_place_of
from logdepth.fused.merges import Merges, Net, NetSettings
from logdepth.fused.mlp_ldru_cell import MLPLDRUCell
from logdepth.fused.once import by_kernels
from logdepth.fused.program import Program, program_of
from logdepth.fused.weights import NetWeights
from logdepth.kernels import DTYPES, launched_where, usable_on
from logdepth.kernels.dropout import draw_seed, rate_of
from logdepth.kernels.linear import fits_states
from logdepth.kernels.lookup import look_up
from logdepth.kernels.rows import scatter_rows
from logdepth.operators import GRC, MLPLDRU, PostMerge
from logdepth.operators.activation import name_of
from logdepth.scanning import Operator, OperatorPair
from logdepth.scanning.plan import Plan
from logdepth.scanning.sweep import OwnSweep, Swept

ROOM = 3
"""States for each element that a scan may have: itself, and fewer than two merged ones where no state was stored."""
_TOO_PRECISE = "fused kernels compute in float32 at most"
CELLS: dict[type[nn.Module], type[Cell[Any, Any, Any]]] = {GRC: GRCCell, MLPLDRU: MLPLDRUCell}
"""Operators for which there are kernels, by their very type: what is made from it may compute something else."""


class Room(NamedTuple):
    """Memory that elements were written to the beginning of."""

    states: Tensor
    num_elements: int
    in_place: bool
    """Whether it is for a scan that overwrites them; else there is more of it behind them."""


class Settings(NamedTuple):
    """What a scan does, beside its weights."""

    cell: type[Cell[Any, Any, Any]]
    of_cell: Any
    num_of_cell: int
    """How many of the weights are the operator's; they come first."""
    net: NetSettings | None
    drops: bool
    """Whether anything is dropped."""
    dtype: torch.dtype
    """Of states and matrix products."""
    recompute: bool
    """Whether the backward pass computes again what else would be kept for it."""


def why_not_fused(operator: Operator | OperatorPair, weight: Tensor) -> str | None:
    """None where `FusedOperator` can stand for the operator with weights like this one; else the reason."""
    if reason := _no_cell(operator) or _changed(operator):
        return reason
    if weight.dtype not in DTYPES:
        return f"{_TOO_PRECISE}; weights are {weight.dtype}"
    kind = weight.device.type
    return None if usable_on(weight.device) else f"fused kernels need a CUDA GPU and Triton; this is the {kind}"


def _no_cell(operator: Operator | OperatorPair) -> str | None:
    """Why there are no kernels for it on any machine, if so."""
    up, down = operator if isinstance(operator, tuple) else (operator, operator)
    inner = up.operator if type(up) is PostMerge else up
    cell = CELLS.get(type(inner))  # type: ignore[arg-type]
    if cell is None:
        names = " and ".join(one.__name__ for one in CELLS)
        return f"there are fused kernels for {names} alone; this is {type(inner).__name__}"
    if down is not up and down is not inner:
        return "there are fused kernels where both sweeps have one operator, the up-sweep's with a PostMerge at most"
    return cell.refusal(inner)


def _changed(operator: Operator | OperatorPair) -> str | None:
    """What of it is not as it is built, if so."""
    up = cast(nn.Module, operator[0] if isinstance(operator, tuple) else operator)
    if not isinstance(up, PostMerge):
        return why_changed(up, lambda: type(up)(1))
    cell = cast(type[nn.Module], type(up.operator))
    return why_changed(up, lambda: PostMerge(cell(1), 1))


class FusedOperator(OwnSweep):
    """Stands for an operator, alone or with a net after its merges, in `scan`; the weights stay the modules' own."""

    def __init__(self, operator: Operator | OperatorPair, casts: Casts | None = None) -> None:
        # A model, which has casts, asked when it was accelerated; it makes one of these a layer in every pass.
        if reason := _no_cell(operator) or (_changed(operator) if casts is None else None):
            raise TypeError(reason)
        up, down = operator if isinstance(operator, tuple) else (operator, operator)
        self.post = up if isinstance(up, PostMerge) else None
        self.operator = cast(Any, up if self.post is None else self.post.operator)
        self.cell = CELLS[type(self.operator)]
        self.net_on_folds = down is self.post
        self.width = self.operator.width
        self.casts = casts
        """Copies of the weights in the dtype of the products, where they are at hand."""
        self._room: Room | None = None

    def room(self, num_elements: int, like: Tensor) -> Tensor:
        """Memory for elements, of the dtype of `like`. The next sweep, if it is of all of them, does not copy them; so
        they must stay as they are until its backward pass is done. Or its answers take their place: see `_in_place`."""
        in_place = self._in_place(num_elements, like.dtype, like.device)
        states = like.new_empty((1 if in_place else ROOM) * num_elements, self.width)
        self._room = Room(states, num_elements, in_place)
        return states.data[:num_elements]  # for autograd, no view of what merges will write

    def sweep(
        self, plan: Plan, elements: Tensor, blocks: Tensor, prefixes: Tensor, edges: Tensor, checkpoint: bool
    ) -> Swept:
        if not usable_on(elements.device):
            raise ValueError(f"fused kernels need a CUDA GPU and Triton; elements are on the {elements.device.type}")
        room, self._room = self._room, None
        program = program_of(plan, len(edges), elements.device)
        of_cell = self.cell.weights_of(self.operator)
        of_net: tuple[Tensor, ...] = () if self.post is None else NetWeights.of(self.post)
        weights = (*of_cell, *of_net)
        settings = self._settings(elements, len(of_cell), checkpoint)
        if settings.dtype not in DTYPES:
            raise TypeError(f"{_TOO_PRECISE}; elements are {settings.dtype}")
        casts = self.casts or Casts(weights, settings.dtype)
        low = (*_cast(casts, of_cell), *_cast(casts, of_net))
        inputs = (elements, blocks, prefixes, edges, *weights)
        # Asked here: what is inside a Function knows nothing of torch.no_grad.
        learns = torch.is_grad_enabled() and any(one.requires_grad for one in inputs)
        in_place = self._in_place(len(elements), settings.dtype, elements.device)
        placed = in_place_of(plan, program) if in_place else None
        with launched_where(elements):
            outputs, new_blocks, new_prefixes = _FusedScan.apply(  # type: ignore[no-untyped-call]
                settings, program, placed, learns, low, room, *inputs
            )
        return Swept(outputs, [new_blocks], [new_prefixes])

    def _in_place(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether results take the places of operands: where nothing is kept for a backward pass, nor dropped.

        And where it pays. To work it out takes as long as a hundred passes gain by it; and in the up-sweep operands
        would lie side by side without it, so products must be able to read them where they lie with it: those of
        three levels, which have seven eighths of the merges.
        """
        possible = self.cell.in_place and not torch.is_grad_enabled() and not self._drops()
        return possible and for_replays() and fits_states(num_elements // 8, self.width, dtype, device)

    def _drops(self) -> bool:
        modules = (self.operator if self.post is None else self.post).modules()
        return any(rate_of(one) > 0 for one in modules if isinstance(one, nn.Dropout))

    def _settings(self, elements: Tensor, num_of_cell: int, recompute: bool) -> Settings:
        post, net = self.post, None
        if post is not None:
            net = NetSettings(name_of(post.activation), post.norm.eps, rate_of(post.dropout), self.net_on_folds)
        return Settings(
            cell=self.cell,
            of_cell=self.cell.settings_of(self.operator),
            num_of_cell=num_of_cell,
            net=net,
            drops=self._drops(),
            dtype=arithmetic_dtype(elements),
            recompute=recompute,
        )


def _cast(casts: Casts, weights: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What products read in their dtype; norms read theirs, the last two, as they are."""
    return *(casts[one] for one in weights[:-2]), *weights[-2:]


class _FusedScan(torch.autograd.Function):
    """A scan as one node of the graph: the states of all prefixes, and the tables of the new state."""

    @staticmethod
    def forward(
        ctx: Any,
        settings: Settings,
        program: Program,
        placed: InPlace | None,
        learns: bool,
        low: tuple[Tensor, ...],
        room: Room | None,
        elements: Tensor,
        blocks: Tensor,
        prefixes: Tensor,
        edges: Tensor,
        *_weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = (elements, blocks, prefixes, edges)
        states = _states(settings, program, room, inputs, in_place=placed is not None)
        # Nobody reads it where nothing is dropped.
        seed = draw_seed(elements.device) if settings.drops else program.outputs
        merges = _merges(settings, program, low, states, seed)
        if placed is not None:
            return _swept_in_place(merges, placed, elements)
        traces = merges.traces() if learns and not settings.recompute else None
        merges.forward(traces)
        if learns:
            ctx.settings, ctx.program, ctx.traces = settings, program, traces
            ctx.dtypes = [one.dtype for one in inputs]
            ctx.sizes = [len(one) for one in inputs]
            ctx.save_for_backward(states, merges.seed, *low)
            ctx.set_materialize_grads(False)
        outputs, blocks, prefixes = (
            _looked_up(states, rows, elements.dtype)  # what a scan returns is of the dtype of what it is given
            for rows in (program.outputs, program.blocks, program.prefixes)
        )
        return outputs, blocks, prefixes

    @staticmethod
    @by_kernels
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
        traces, ctx.traces = ctx.traces, None  # overwritten: they cannot serve twice, not even where this fails
        weight_grads = merges.backward(grads, traces)
        inputs = torch.split(grads[: program.num_inputs], ctx.sizes)
        # Nothing for inputs without rows: autograd would make zeros of the size of what they were cut from.
        input_grads = (one.to(dtype) if len(one) else None for one, dtype in zip(inputs, ctx.dtypes, strict=True))
        return None, None, None, None, None, None, *input_grads, *weight_grads


def _swept_in_place(merges: Merges, placed: InPlace, elements: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    states, dtype = merges.states, elements.dtype
    merges.forward_in_place(placed.up, up=True)
    blocks = _looked_up(states, placed.blocks, dtype)
    merges.forward_in_place(placed.down, up=False)
    prefixes = _looked_up(states, placed.prefixes, dtype)
    outputs = states.to(dtype) if placed.outputs is None else _looked_up(states, placed.outputs, dtype)
    if states.data_ptr() == elements.data_ptr() and not elements.is_inference():
        torch.autograd.graph.increment_version(elements)  # kernels have written to them, which autograd does not see
    return outputs, blocks, prefixes


def _states(
    settings: Settings, program: Program, room: Room | None, inputs: Sequence[Tensor], *, in_place: bool
) -> Tensor:
    """Rows for all states, with the inputs in the first ones; `in_place`, for no more than these."""
    elements, *others = inputs
    num_states = program.num_inputs if in_place else program.num_states
    if room is not None and room.in_place == in_place and _fits(room, elements, settings.dtype, num_states):
        states, first = room.states[:num_states], len(elements)
    else:
        states = elements.new_empty(num_states, elements.shape[1], dtype=settings.dtype)
        others, first = list(inputs), 0
    if first < program.num_inputs:
        torch.cat([one.to(settings.dtype) for one in others], out=states[first : program.num_inputs])
    return states


def _fits(room: Room, elements: Tensor, dtype: torch.dtype, num_states: int) -> bool:
    """Whether all that was written in `room` are these elements, and little of it would be left over."""
    states = room.states
    as_written = states.data_ptr() == elements.data_ptr() and len(elements) == room.num_elements
    like_states = states.dtype == elements.dtype == dtype and elements.is_contiguous()
    return as_written and like_states and 3 * len(states) <= 4 * num_states <= 4 * len(states)


def _looked_up(states: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    out = states.new_empty(len(rows), states.shape[1], dtype=dtype)
    look_up(states, rows, out)
    return out


def _merges(settings: Settings, program: Program, low: Sequence[Tensor], states: Tensor, seed: Tensor) -> Merges:
    cell = settings.cell(settings.of_cell, low[: settings.num_of_cell], seed)
    net = None if settings.net is None else Net(settings.net, NetWeights(*low[settings.num_of_cell :]))
    return Merges(program, cell, net, states, seed)
