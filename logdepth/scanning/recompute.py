"""Merges that store only their operands and are recomputed in the backward pass, a bounded number of rows at a time.

The merges of a module run without an autograd graph in the forward pass. The backward pass recomputes them with the
weights of the forward pass. For other callables the tensors that they read are unknown, so they use
torch.utils.checkpoint, which needs more memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint as library_checkpoint
from torch.utils.checkpoint import get_device_states, set_device_states

from logdepth.shapes import Rows

CHUNK_ROWS = 2048
"""Maximum number of rows recomputed at a time, which bounds the working memory of the backward pass."""

Check = Callable[[Callable[[Rows, Rows], Rows], Rows, Rows], Rows]
"""Calls an operator on two operands and checks its result."""


def merge_and_recompute(check: Check, operator: Any, left: Rows, right: Rows) -> Rows:
    """Return `check(operator, left, right)`. Its backward pass recomputes the intermediate results."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError("checkpoint=True does not support torch.func transforms; remove it")
    if isinstance(operator, nn.Module):
        if parametrize._cache_enabled:
            raise RuntimeError(
                "checkpoint=True does not work inside parametrize.cached(), where weight gradients would be lost; "
                "remove one of them"
            )
        with _weights_lock:  # the backward pass of another thread may have replaced this module's weights
            slots, weights = _slots(operator)
            if any(one.requires_grad for one in (left, right, *weights)):
                arguments = (check, operator, slots, left, right, *weights)
                return _RecomputedMerge.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]
        # No known tensor requires gradients, so nothing is stored. If the operator reads an unregistered tensor that
        # requires gradients, its result does too, and the next level detects it.
        return check(operator, left, right)
    chunks = [
        library_checkpoint(check, operator, some_left, some_right, use_reentrant=False)
        for some_left, some_right in zip(torch.split(left, CHUNK_ROWS), torch.split(right, CHUNK_ROWS), strict=True)
    ]
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


class _RecomputedMerge(torch.autograd.Function):
    """A merge by a module that saves its operands and weights, and is recomputed in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        check: Check,
        operator: nn.Module,
        slots: list["_Slot"],
        left: Tensor,
        right: Tensor,
        *weights: Tensor,
    ) -> Tensor:
        ctx.check, ctx.operator, ctx.slots = check, operator, slots
        ctx.modes = [module.training for module in operator.modules()]
        ctx.learns = [weight.requires_grad for weight in weights]
        ctx.save_for_backward(left, right, *weights)
        ctx.random_states = torch.get_rng_state(), get_device_states(left)
        device = left.device.type
        ctx.autocast = {
            "device_type": device,
            "enabled": torch.is_autocast_enabled(device),
            "dtype": torch.get_autocast_dtype(device),
        }
        merged = torch.empty_like(left)
        for rows in _chunks(left):
            merged[rows] = check(operator, left[rows], right[rows])
        return merged

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "checkpoint=True does not support create_graph=True, which would lose second derivatives; "
                "remove one of them"
            )
        if [module.training for module in ctx.operator.modules()] != ctx.modes:
            raise RuntimeError(
                "checkpoint=True: the operator was switched between train() and eval() after the forward pass; "
                "keep its mode until the backward pass"
            )
        left, right, *saved = ctx.saved_tensors
        left_grad, right_grad = torch.zeros_like(left), torch.zeros_like(right)
        weight_grads: list[Tensor | None] = [None] * len(saved)
        # Leaves of their own: hooks on the weights fire once, for the gradient of the whole merge.
        # Copies where nothing is learnt: an operator may update its buffers, and this pass may run again.
        weights = [
            one.detach().requires_grad_() if learns else one.detach().clone()
            for one, learns in zip(saved, ctx.learns, strict=True)
        ]
        cpu_state, (devices, device_states) = ctx.random_states
        with torch.random.fork_rng(devices), torch.autocast(**ctx.autocast), _replaced_weights(ctx.slots, weights):
            torch.set_rng_state(cpu_state)
            set_device_states(devices, device_states)
            for rows in _chunks(left):
                some_left, some_right = left[rows].detach().requires_grad_(), right[rows].detach().requires_grad_()
                with torch.enable_grad():
                    merged = ctx.check(ctx.operator, some_left, some_right)
                if not merged.requires_grad:
                    continue
                _check_reads_only(merged, (some_left, some_right, *weights))
                learning = [number for number, learns in enumerate(ctx.learns) if learns]
                inputs = (some_left, some_right, *(weights[number] for number in learning))
                grads = torch.autograd.grad(merged, inputs, grad[rows], allow_unused=True)
                for whole, part in zip((left_grad, right_grad), grads[:2], strict=True):
                    if part is not None:
                        whole[rows] = part
                for number, part in zip(learning, grads[2:], strict=True):
                    weight_grads[number] = _sum(weight_grads[number], part)
        return None, None, None, left_grad, right_grad, *weight_grads


_Slot = tuple[nn.Module, str, str, int]
"""Module, dictionary and name of a weight or buffer, and the number of its tensor. Tied weights have several slots."""
_weights_lock = RLock()


def _slots(operator: nn.Module) -> tuple[list[_Slot], list[Tensor]]:
    """Return the slots of all weights and buffers, and their tensors. Buffers without gradients are copied."""
    numbers: dict[int, int] = {}
    slots: list[_Slot] = []
    found: list[Tensor] = []
    for module in operator.modules():
        for kind in ("_parameters", "_buffers"):
            for name, tensor in getattr(module, kind).items():
                if tensor is None:
                    continue
                if id(tensor) not in numbers:
                    numbers[id(tensor)] = len(found)
                    copied = kind == "_buffers" and not tensor.requires_grad
                    found.append(tensor.clone() if copied else tensor)
                slots.append((module, kind, name, numbers[id(tensor)]))
    return slots, found


@contextmanager
def _replaced_weights(slots: list[_Slot], weights: list[Tensor]) -> Iterator[None]:
    """Replace weights during the block. torch.func.functional_call would miss weights of a module used twice."""
    with _weights_lock:
        own = [getattr(module, kind)[name] for module, kind, name, _ in slots]
        try:
            for module, kind, name, number in slots:
                getattr(module, kind)[name] = weights[number]
            yield
        finally:
            for (module, kind, name, _), weight in zip(slots, own, strict=True):
                getattr(module, kind)[name] = weight


def _sum(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    return other if one is None else one if other is None else one + other


def _chunks(rows: Rows) -> list[slice]:
    return [slice(start, start + CHUNK_ROWS) for start in range(0, rows.shape[0], CHUNK_ROWS)]


def _check_reads_only(merged: Tensor, inputs: tuple[Tensor, ...]) -> None:
    """Raise an error if the result depends on a tensor that would silently receive no gradient."""
    known = {id(one) for one in inputs}
    nodes, seen = [merged.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in known:
            raise RuntimeError(
                "with checkpoint=True, all tensors that an operator module learns must be its parameters; "
                f"this operator also reads a tensor of shape {tuple(leaf.shape)} that requires gradients. "
                "Register the tensor as a parameter and read it as an attribute, or wrap the operator in a plain "
                "function. Do not change the operator between the forward and the backward pass"
            )
        nodes.extend(next_node for next_node, _ in node.next_functions)
