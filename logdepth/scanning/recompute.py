"""Merges that store their operands alone and run again in the backward pass, a bounded number of rows at a time.

A module's merges are recomputed here, without a graph in the forward pass, from the weights that the forward pass saw.
Of any other callable we cannot know which tensors it reads, so it goes through torch.utils.checkpoint, which finds out
as it runs and takes more memory for it.
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
"""Rows that are recomputed at a time: what bounds the working memory of the backward pass."""

Check = Callable[[Callable[[Rows, Rows], Rows], Rows, Rows], Rows]
"""Calls an operator on two operands and checks its answer."""


def merge_and_recompute(check: Check, operator: Any, left: Rows, right: Rows) -> Rows:
    """`check(operator, left, right)`, with what its backward pass needs computed again then."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError("checkpoint=True is for plain backward passes: leave it out under torch.func transforms")
    if isinstance(operator, nn.Module):
        if parametrize._cache_enabled:
            raise RuntimeError(
                "checkpoint=True does not work inside parametrize.cached(): weight gradients would be lost"
            )
        with _lending:  # another thread's backward pass may have lent this module other weights
            slots, weights = _slots(operator)
            if any(one.requires_grad for one in (left, right, *weights)):
                arguments = (check, operator, slots, left, right, *weights)
                return _RecomputedMerge.apply(*arguments)  # type: ignore[no-any-return, no-untyped-call]
        # Nothing known to learn, so nothing is stored; an operator that learns in secret is found at the next level.
        return check(operator, left, right)
    chunks = [
        library_checkpoint(check, operator, some_left, some_right, use_reentrant=False)
        for some_left, some_right in zip(torch.split(left, CHUNK_ROWS), torch.split(right, CHUNK_ROWS), strict=True)
    ]
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


class _RecomputedMerge(torch.autograd.Function):
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
            raise RuntimeError("checkpoint=True does not support create_graph=True: second derivatives would be lost")
        if [module.training for module in ctx.operator.modules()] != ctx.modes:
            raise RuntimeError("checkpoint=True: the operator went between train() and eval() since the forward pass")
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
        with torch.random.fork_rng(devices), torch.autocast(**ctx.autocast), _lent(ctx.slots, weights):
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
"""Where a module keeps a weight or buffer, and which one it is: tied ones have several places."""
_lending = RLock()


def _slots(operator: nn.Module) -> tuple[list[_Slot], list[Tensor]]:
    """Every place of a weight or buffer, and what lies there now; buffers that learn nothing as copies."""
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
def _lent(slots: list[_Slot], weights: list[Tensor]) -> Iterator[None]:
    """Modules with other weights for a while. torch.func.functional_call would lose those of a module used twice."""
    with _lending:
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
    """Refuse an operator whose result depends on a tensor that its gradient would silently miss."""
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
                "with checkpoint=True an operator module must have every tensor that it learns among its parameters; "
                f"this one also reads a tensor of shape {tuple(leaf.shape)} that requires gradients. "
                "Register it as a parameter and read it by its name there, or wrap the operator in a plain function; "
                "and leave the operator as it is between the forward and the backward pass"
            )
        nodes.extend(next_node for next_node, _ in node.next_functions)
