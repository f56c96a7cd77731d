"""Linear maps and LayerNorms one after the other, with skips, as one node of the graph.

As one, because of its backward pass: a chain of short kernels, beside which the weights' gradients are summed.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from logdepth.fused.beside import Beside
from logdepth.fused.casts import Casts
from logdepth.fused.linear_and_norm import normed_gradients
from logdepth.fused.once import by_kernels
from logdepth.fused.weights import matrix_grad
from logdepth.kernels.column_sums import column_sums
from logdepth.kernels.norm import fill_normed


class Layer(NamedTuple):
    """act(LN(W · x + b) + skip), or W · x + b without a norm, which then has no skip either."""

    linear: nn.Linear
    norm: nn.LayerNorm | None
    source: int
    """Which value is x: 0 is what comes in, 1 what the first layer makes of it, and so on."""
    skip: int | None = None
    """Likewise."""
    silu: bool = True

    def reads(self) -> tuple[int, ...]:
        return (self.source,) if self.skip is None else (self.source, self.skip)

    def parameters(self) -> tuple[Tensor, ...]:
        modules = (self.linear,) if self.norm is None else (self.linear, self.norm)
        return tuple(one for module in modules for one in (module.weight, module.bias))


class _Trace(NamedTuple):
    """What a backward pass reads of a layer; of one without a norm, none of the last four."""

    x: Tensor
    weight: Tensor
    mapped: Tensor | None = None
    scale: Tensor | None = None
    shift: Tensor | None = None
    skip: Tensor | None = None


def through_layers(casts: Casts, layers: Sequence[Layer], x: Tensor) -> Tensor:
    """What the last layer makes of `x` `[rows, width]`, in the dtype of the products; all others are read."""
    learnt = [one for layer in layers for one in layer.parameters()]
    if torch.is_grad_enabled() and any(one.requires_grad for one in (x, *learnt)):
        return _Layers.apply(casts, tuple(layers), x, *learnt)  # type: ignore[no-any-return, no-untyped-call]
    return _forward(casts, layers, x, None)


def _forward(casts: Casts, layers: Sequence[Layer], x: Tensor, traces: list[_Trace] | None) -> Tensor:
    """Adds the traces, or keeps no value longer than it is read."""
    values = {0: x}
    last_read = {value: number for number, layer in enumerate(layers, start=1) for value in layer.reads()}
    for number, layer in enumerate(layers, start=1):
        values[number] = _value(casts, layer, values, traces)
        if traces is None:
            values = {value: kept for value, kept in values.items() if last_read.get(value, number + 1) > number}
    return values[len(layers)]


def _value(casts: Casts, layer: Layer, values: Mapping[int, Tensor], traces: list[_Trace] | None) -> Tensor:
    x, weight = values[layer.source], casts[layer.linear.weight]
    mapped = torch.addmm(casts[layer.linear.bias], x, weight.t())
    if layer.norm is None:
        if traces is not None:
            traces.append(_Trace(x, weight))
        return mapped
    skip = None if layer.skip is None else values[layer.skip]
    scale, shift = layer.norm.weight, layer.norm.bias
    out = torch.empty_like(mapped)
    fill_normed(mapped, scale, shift, skip, out, eps=layer.norm.eps, silu=layer.silu)
    if traces is not None:
        traces.append(_Trace(x, weight, mapped, scale, shift, skip))
    return out


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, casts: Casts, layers: Sequence[Layer], x: Tensor, *_learnt: Tensor) -> Tensor:
        traces: list[_Trace] = []
        out = _forward(casts, layers, x, traces)
        ctx.layers = layers
        ctx.save_for_backward(*(one for trace in traces for one in trace))
        return out

    @staticmethod
    @by_kernels
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layers: Sequence[Layer] = ctx.layers
        saved, size = ctx.saved_tensors, len(_Trace._fields)
        grads = {len(layers): grad.contiguous()}
        learnt: list[Tensor] = []
        with Beside(grad.device) as second:
            for number in range(len(layers), 0, -1):
                layer, trace = layers[number - 1], _Trace(*saved[size * (number - 1) : size * number])
                of_mapped, of_skip, learnt_here = _backward(second, layer, trace, grads.pop(number))
                learnt = [*learnt_here, *learnt]
                if layer.skip is not None and of_skip is not None:
                    grads[layer.skip] = grads[layer.skip] + of_skip if layer.skip in grads else of_skip
                if layer.source in grads:  # made here: what came in was popped first
                    grads[layer.source].addmm_(of_mapped, trace.weight)
                else:
                    grads[layer.source] = of_mapped @ trace.weight
        return None, None, grads[0], *learnt


def _backward(
    second: Beside, layer: Layer, trace: _Trace, grad: Tensor
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Gradients of W · x + b, of the skip, and of the parameters; these are summed beside the rest."""
    if layer.norm is None:
        with second.beside(grad):
            learnt = matrix_grad(grad, trace.x), column_sums(grad)
        second.made(*learnt)
        return grad, None, learnt
    assert trace.mapped is not None
    assert trace.scale is not None
    assert trace.shift is not None
    of_mapped, of_skip, partial_sums = normed_gradients(
        grad, trace.mapped, trace.scale, trace.shift, trace.skip, eps=layer.norm.eps, silu=layer.silu
    )
    with second.beside(of_mapped, partial_sums):
        sums, weight_grad = column_sums(partial_sums), matrix_grad(of_mapped, trace.x)
    second.made(sums, weight_grad)
    scale_grad, shift_grad, bias_grad = torch.split(sums, len(trace.scale))
    return of_mapped, of_skip, (weight_grad, bias_grad, scale_grad, shift_grad)
