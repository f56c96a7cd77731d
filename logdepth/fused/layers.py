"""Linear maps and LayerNorms one after the other, with skips, as one node of the graph.

As one, because of its backward pass: a chain of short kernels, beside which the weights' gradients are summed.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from logdepth.fused.beside import Beside
from logdepth.fused.casts import Casts
from logdepth.fused.linear_and_norm import normed_gradients
from logdepth.fused.weights import matrix_grad
from logdepth.kernels.column_sums import column_sums
from logdepth.kernels.norm import fill_normed


class Layer(NamedTuple):
    """act(LN(W · x + b) + skip), or W · x + b without a norm."""

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
    """What a backward pass reads of a layer; of one without a norm, `mapped` is not read, nor what comes after it."""

    x: Tensor
    weight: Tensor
    mapped: Tensor
    scale: Tensor | None
    shift: Tensor | None
    skip: Tensor | None


def through_layers(casts: Casts, layers: Sequence[Layer], x: Tensor) -> Tensor:
    """What the last layer makes of `x` `[rows, width]`, in the dtype of the products."""
    if not torch.is_grad_enabled():
        return _forward(casts, layers, x, None)
    learnt = (one for layer in layers for one in layer.parameters())
    return _Layers.apply(casts, layers, x, *learnt)  # type: ignore[no-any-return, no-untyped-call]


def _forward(casts: Casts, layers: Sequence[Layer], x: Tensor, traces: list[_Trace] | None) -> Tensor:
    """Adds the traces, or keeps no value longer than it is read."""
    values = {0: x}
    last_read = {value: number for number, layer in enumerate(layers, start=1) for value in layer.reads()}
    for number, layer in enumerate(layers, start=1):
        source, weight = values[layer.source], casts[layer.linear.weight]
        mapped = values[number] = torch.addmm(casts[layer.linear.bias], source, weight.t())
        trace = _Trace(source, weight, mapped, None, None, None)
        if norm := layer.norm:
            skip = None if layer.skip is None else values[layer.skip]
            trace = _Trace(source, weight, mapped, norm.weight, norm.bias, skip)
            values[number] = torch.empty_like(mapped)
            fill_normed(mapped, norm.weight, norm.bias, skip, values[number], eps=norm.eps, silu=layer.silu)
        if traces is not None:
            traces.append(trace)
        else:
            values = {value: kept for value, kept in values.items() if last_read.get(value, number + 1) > number}
    return values[len(layers)]


class _Layers(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, casts: Casts, layers: Sequence[Layer], x: Tensor, *_learnt: Tensor) -> Tensor:
        traces: list[_Trace] = []
        out = _forward(casts, layers, x, traces)
        ctx.layers = layers
        ctx.save_for_backward(*(one for trace in traces for one in trace))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        layers: Sequence[Layer] = ctx.layers
        saved, size = ctx.saved_tensors, len(_Trace._fields)
        grads = {len(layers): grad.contiguous()}
        learnt: list[Tensor] = []
        second = Beside(grad.device)
        for number in range(len(layers), 0, -1):
            layer, trace = layers[number - 1], _Trace(*saved[size * (number - 1) : size * number])
            of_mapped, of_skip, learnt_here = _backward(second, layer, trace, grads.pop(number))
            learnt = [*learnt_here, *learnt]
            if layer.skip is not None and of_skip is not None:
                grads[layer.skip] = grads[layer.skip] + of_skip if layer.skip in grads else of_skip
            grads[layer.source] = (
                torch.addmm(grads[layer.source], of_mapped, trace.weight)
                if layer.source in grads
                else of_mapped @ trace.weight
            )
        second.join()
        return None, None, grads[0], *learnt


def _backward(
    second: Beside, layer: Layer, trace: _Trace, grad: Tensor
) -> tuple[Tensor, Tensor | None, tuple[Tensor, ...]]:
    """Gradients of W · x + b, of the skip, and of the parameters; these are summed beside the rest."""
    if layer.norm is None:
        with second.beside(grad):
            return grad, None, (matrix_grad(grad, trace.x), column_sums(grad))
    assert trace.scale is not None
    assert trace.shift is not None
    of_mapped, of_skip, sums = normed_gradients(
        grad, trace.mapped, trace.scale, trace.shift, trace.skip, eps=layer.norm.eps, silu=layer.silu
    )
    with second.beside(of_mapped, sums):
        scale_grad, shift_grad, bias_grad = torch.split(column_sums(sums), len(trace.scale))
        return of_mapped, of_skip, (matrix_grad(of_mapped, trace.x), bias_grad, scale_grad, shift_grad)
