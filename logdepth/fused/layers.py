"""Linear maps and LayerNorms one after the other, with skips, as one node of the graph.

As one, because of its backward pass: gradients of rows are a chain of short kernels. What parameters learn is summed
when all of it is done, and together: one product for layers of one shape, one sum for all norms.
"""

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from logdepth.fused.casts import Casts
from logdepth.fused.once import by_kernels
from logdepth.fused.weights import matrix_grad
from logdepth.kernels.column_sums import column_sums
from logdepth.kernels.norm import fill_normed, norm_programs, normed_backward


class Layer(NamedTuple):
    """act(LN(W · x + b) + skip), or W · x + b without a norm, which then has no skip either."""

    linear: nn.Linear
    norm: nn.LayerNorm | None
    source: int
    """Which value is x: 0 is what comes in, 1 what the first layer makes of it, and so on."""
    skip: int | None = None
    """Likewise."""
    silu: bool = True

    @property
    def width(self) -> int:
        return self.linear.out_features

    def reads(self) -> tuple[int, ...]:
        return (self.source,) if self.skip is None else (self.source, self.skip)

    def parameters(self) -> tuple[Tensor, ...]:
        modules = (self.linear,) if self.norm is None else (self.linear, self.norm)
        return tuple(one for module in modules for one in (module.weight, module.bias))


Layers = Mapping[int, Layer]
"""By the number of the value that each makes."""


def through_layers(casts: Casts, layers: Sequence[Layer], x: Tensor) -> Tensor:
    """What the last layer makes of `x` `[rows, width]`, in the dtype of the products; all others are read."""
    numbered, x = dict(enumerate(layers, start=1)), x.contiguous()
    learnt = [one for layer in layers for one in layer.parameters()]
    if torch.is_grad_enabled() and any(one.requires_grad for one in (x, *learnt)):
        return _Layers.apply(casts, numbered, x, *learnt)  # type: ignore[no-any-return, no-untyped-call]
    values = {0: x}
    last_read = {value: number for number, layer in numbered.items() for value in layer.reads()}
    for number, layer in numbered.items():
        values[number] = x.new_empty(len(x), layer.width)
        _fill(casts, layer, values, values[number])
        # No value is kept longer than it is read.
        values = {value: kept for value, kept in values.items() if last_read.get(value, number + 1) > number}
    return values[len(layers)]


def _fill(casts: Casts, layer: Layer, values: Mapping[int, Tensor], out: Tensor) -> Tensor | None:
    """Fills a layer's value; returns what its norm reads, if it has one."""
    weight, bias = casts[layer.linear.weight], casts[layer.linear.bias]
    if layer.norm is None:
        torch.addmm(bias, values[layer.source], weight.t(), out=out)
        return None
    mapped = torch.addmm(bias, values[layer.source], weight.t())
    skip = None if layer.skip is None else values[layer.skip]
    fill_normed(mapped, layer.norm.weight, layer.norm.bias, skip, out, eps=layer.norm.eps, silu=layer.silu)
    return mapped


class Place(NamedTuple):
    """Of a value on a shelf. There is one for each width, `[values, rows, width]`: a product takes several at once."""

    width: int
    at: int


def places_of(layers: Layers) -> dict[int, Place]:
    """Of all values but the first and the last, which are the caller's."""
    taken: Counter[int] = Counter()
    places: dict[int, Place] = {}
    for number in list(layers)[:-1]:
        width = layers[number].width
        places[number] = Place(width, taken[width])
        taken[width] += 1
    return places


class Batch(NamedTuple):
    """Layers of one shape, all with a norm, whose weights' gradients are one product."""

    numbers: tuple[int, ...]
    read: slice | None
    """Where what they read lies on its shelf; None for one layer by itself."""


def batches_of(layers: Layers, places: Mapping[int, Place]) -> list[Batch]:
    """All layers with a norm. Those of one shape are together where what they read lies at equal distances."""
    alike: dict[tuple[int, int, bool], list[int]] = {}
    for number, layer in layers.items():
        if layer.norm is not None:
            kind = layer.linear.in_features, layer.width, layer.source in places
            alike.setdefault(kind, []).append(number)
    batches: list[Batch] = []
    for (_, _, on_shelf), numbers in alike.items():
        read = [places[layers[number].source].at for number in numbers] if on_shelf else []
        distances = {after - before for before, after in itertools.pairwise(read)}
        if len(distances) == 1 and (distance := distances.pop()) > 0:
            batches.append(Batch(tuple(numbers), slice(read[0], read[-1] + 1, distance)))
        else:
            batches += [Batch((number,), None) for number in numbers]
    return batches


class _Trace(NamedTuple):
    """What a backward pass reads of a layer beside values; of one without a norm, its weight alone."""

    weight: Tensor
    mapped: Tensor | None
    scale: Tensor | None
    shift: Tensor | None


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, casts: Casts, layers: Layers, x: Tensor, *_learnt: Tensor) -> Tensor:
        ctx.layers, ctx.places = layers, places_of(layers)
        counts = Counter(place.width for place in ctx.places.values())
        shelves = {width: x.new_empty(count, len(x), width) for width, count in counts.items()}
        values = _values(ctx.places, x, shelves)
        out = values[len(layers)] = x.new_empty(len(x), layers[len(layers)].width)
        traces: list[_Trace] = []
        for number, layer in layers.items():
            mapped = _fill(casts, layer, values, values[number])
            of_norm = (None, None) if layer.norm is None else (layer.norm.weight, layer.norm.bias)
            traces.append(_Trace(casts[layer.linear.weight], mapped, *of_norm))
        ctx.widths = tuple(shelves)
        ctx.save_for_backward(x, *shelves.values(), *(one for trace in traces for one in trace))
        return out

    @staticmethod
    @by_kernels
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        num_shelves, size = len(ctx.widths), len(_Trace._fields)
        shelves, saved = dict(zip(ctx.widths, saved[:num_shelves], strict=True)), saved[num_shelves:]
        traces = {number: _Trace(*saved[size * (number - 1) : size * number]) for number in ctx.layers}
        backward = _Backward(ctx.layers, ctx.places, x, shelves, traces)
        return None, None, backward.of_rows(grad), *backward.of_parameters()


def _values(places: Mapping[int, Place], x: Tensor, shelves: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """All but the last."""
    return {0: x} | {number: shelves[width][at] for number, (width, at) in places.items()}


class _Backward:
    """One backward pass: gradients of rows, then those of parameters."""

    def __init__(
        self,
        layers: Layers,
        places: Mapping[int, Place],
        x: Tensor,
        shelves: Mapping[int, Tensor],
        traces: Mapping[int, _Trace],
    ) -> None:
        self.layers, self.shelves, self.traces = layers, shelves, traces
        self.values = _values(places, x, shelves)
        self.batches = batches_of(layers, places)
        self.rooms = [x.new_empty(len(one.numbers), len(x), layers[one.numbers[0]].width) for one in self.batches]
        self.of_mapped: dict[int, Tensor] = {}
        """Gradients of W · x + b; those of layers without a norm are added."""
        for batch, room in zip(self.batches, self.rooms, strict=True):
            self.of_mapped |= zip(batch.numbers, room, strict=True)
        widths = [layers[number].width for number in self.of_mapped]
        num_sums = max((norm_programs(len(x), width) for width in widths), default=0)
        self.all_sums = torch.empty(num_sums, 3 * sum(widths), device=x.device)
        """Of all norms side by side: partial sums over rows, for scale, shift and the bias of the map before it."""
        self.columns = [3 * width for width in widths]
        self.sums = dict(zip(self.of_mapped, torch.split(self.all_sums, self.columns, dim=1), strict=True))

    def of_rows(self, grad: Tensor) -> Tensor:
        """The gradient of what came in."""
        grads = {len(self.layers): grad.contiguous()}
        for number in range(len(self.layers), 0, -1):
            layer = self.layers[number]
            of_skip = self._through_norm(number, grads.pop(number))
            # In place: all that are left were made here, since the last layer has taken what came in.
            if layer.skip is not None and of_skip is not None:
                grads[layer.skip] = grads[layer.skip].add_(of_skip) if layer.skip in grads else of_skip
            of_mapped, weight = self.of_mapped[number], self.traces[number].weight
            if layer.source in grads:
                grads[layer.source].addmm_(of_mapped, weight)
            else:
                grads[layer.source] = of_mapped @ weight
        return grads[0]

    def _through_norm(self, number: int, grad: Tensor) -> Tensor | None:
        """From the gradient of a layer's value to that of its skip, and to those that are kept for its parameters."""
        layer, trace = self.layers[number], self.traces[number]
        if layer.norm is None:
            self.of_mapped[number] = grad
            return None
        assert trace.mapped is not None
        assert trace.scale is not None
        assert trace.shift is not None
        skip = None if layer.skip is None else self.values[layer.skip]
        of_skip = None if skip is None else torch.empty_like(skip)
        normed_backward(
            grad, trace.mapped, trace.scale, trace.shift, skip, self.of_mapped[number], of_skip, self.sums[number],
            eps=layer.norm.eps, silu=layer.silu,
        )  # fmt: skip
        return of_skip

    def of_parameters(self) -> list[Tensor]:
        """In the order of the layers' own, after `of_rows`. Those of one product, or sum, share its memory."""
        weights: dict[int, Tensor] = {}
        biases: dict[int, Tensor] = {}
        norms: dict[int, tuple[Tensor, ...]] = {}
        for batch, room in zip(self.batches, self.rooms, strict=True):
            weights |= zip(batch.numbers, self._of_weights(batch, room), strict=True)
        totals = torch.split(column_sums(self.all_sums), self.columns)
        for number, total in zip(self.sums, totals, strict=True):
            scale, shift, biases[number] = total.view(3, -1)
            norms[number] = scale, shift
        for number, layer in self.layers.items():
            if layer.norm is None:
                weights[number] = matrix_grad(self.of_mapped[number], self.values[layer.source])
                biases[number] = column_sums(self.of_mapped[number])
        return [one for number in self.layers for one in (weights[number], biases[number], *norms.get(number, ()))]

    def _of_weights(self, batch: Batch, of_mapped: Tensor) -> Tensor:
        """`[layers, out, in]`."""
        first = self.layers[batch.numbers[0]]
        if batch.read is None:
            return matrix_grad(of_mapped[0], self.values[first.source])[None]
        return matrix_grad(of_mapped, self.shelves[first.linear.in_features][batch.read])
