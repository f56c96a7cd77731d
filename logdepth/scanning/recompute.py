"""Merges that store their operands alone and run again in the backward pass, a bounded number of rows at a time.

A module's merges are recomputed here, without a graph in the forward pass. Of any other callable we cannot know which
tensors it reads, so it goes through torch.utils.checkpoint, which finds out as it runs and takes more memory for it.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint as library_checkpoint
from torch.utils.checkpoint import get_device_states, set_device_states

from logdepth.shapes import Rows

CHUNK_ROWS = 2048
"""Rows that are recomputed at a time: what bounds the working memory of the backward pass."""


def merge_and_recompute(merge: Any, operator: Any, left: Rows, right: Rows) -> Rows:
    """`merge(left, right)`, with what its backward pass needs computed again then. `merge` calls `operator`."""
    if isinstance(operator, nn.Module):
        weights = [weight for weight in operator.parameters() if weight.requires_grad]
        return _RecomputedMerge.apply(merge, left, right, *weights)  # type: ignore[no-any-return, no-untyped-call]
    chunks = [
        library_checkpoint(merge, some_left, some_right, use_reentrant=False)
        for some_left, some_right in zip(torch.split(left, CHUNK_ROWS), torch.split(right, CHUNK_ROWS), strict=True)
    ]
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)


class _RecomputedMerge(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, merge: Any, left: Tensor, right: Tensor, *weights: Tensor) -> Tensor:
        ctx.merge = merge
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
            merged[rows] = merge(left[rows], right[rows])
        return merged

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        left, right, *weights = ctx.saved_tensors
        left_grad, right_grad = torch.empty_like(left), torch.empty_like(right)
        weight_grads: list[Tensor | None] = [None] * len(weights)
        cpu_state, (devices, device_states) = ctx.random_states
        with torch.random.fork_rng(devices), torch.autocast(**ctx.autocast):
            torch.set_rng_state(cpu_state)
            set_device_states(devices, device_states)
            for rows in _chunks(left):
                some_left, some_right = left[rows].detach().requires_grad_(), right[rows].detach().requires_grad_()
                with torch.enable_grad():
                    merged = ctx.merge(some_left, some_right)
                inputs = (some_left, some_right, *weights)
                _check_reads_only(merged, inputs)
                grads = torch.autograd.grad(merged, inputs, grad[rows], allow_unused=True)
                left_grad[rows] = 0 if grads[0] is None else grads[0]
                right_grad[rows] = 0 if grads[1] is None else grads[1]
                weight_grads = [_sum(*pair) for pair in zip(weight_grads, grads[2:], strict=True)]
        return None, left_grad, right_grad, *weight_grads


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
                f"with checkpoint=True an operator module must have every tensor that it learns among its parameters; "
                f"this one also reads a tensor of shape {tuple(leaf.shape)} that requires gradients. "
                "Register it as a parameter, or wrap the operator in a plain function"
            )
        nodes.extend(next_node for next_node, _ in node.next_functions)
