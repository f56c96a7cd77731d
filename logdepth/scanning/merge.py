"""The contract with an operator: what `scan` accepts, what it checks of every answer, how it saves memory.

An operator is any callable (left, right) -> merged on `[rows, width]`, left earlier in time. This file knows
nothing of trees, lengths or states.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as recompute_in_backward

from logdepth.shapes import Rows

Operator = Callable[[Rows, Rows], Rows]
OperatorPair = tuple[Operator, Operator]

CHECKPOINT_ROWS = 4096
"""Rows recomputed at a time in the backward pass of a checkpointed scan: what bounds its working memory."""


def operator_pair(operator: Operator | OperatorPair) -> OperatorPair:
    """`(up, down)`: the operator of block merges and carries, and that of folds onto a prefix."""
    pair = tuple(operator) if isinstance(operator, tuple | list) else (operator, operator)
    if len(pair) != 2 or not all(callable(one) for one in pair):
        raise TypeError(
            "operator must be a callable (left, right) -> merged, or a pair (up, down) of them; got "
            f"{type(operator).__name__}" + (f" of {len(pair)}" if isinstance(operator, tuple | list) else "")
        )
    return pair


def checked_pair(operator: Operator | OperatorPair, device: torch.device, checkpoint: bool) -> OperatorPair:
    """The pair with every answer checked, and recomputed in the backward pass where `checkpoint` is set."""
    autocast = torch.is_autocast_enabled(device.type)
    up, down = operator_pair(operator)

    def prepare(operator: Operator) -> Operator:
        merge = partial(_checked, operator, autocast)
        return partial(_checkpointed, merge) if checkpoint and torch.is_grad_enabled() else merge

    return (prepare(up), prepare(down)) if up is not down else (prepare(up),) * 2


def _checked(operator: Operator, autocast: bool, left: Rows, right: Rows) -> Rows:
    merged = operator(left, right)
    if not isinstance(merged, Tensor):
        raise TypeError(f"operator must return a tensor of shape {tuple(left.shape)}; got {type(merged).__name__}")
    if merged.shape != left.shape:
        raise ValueError(
            f"operator changed the shape: operands {tuple(left.shape)}, result {tuple(merged.shape)}; "
            "it must map [rows, width] and [rows, width] to [rows, width]"
        )
    if merged.device != left.device:
        raise ValueError(f"operator changed the device: operands on {left.device}, result on {merged.device}")
    if merged.dtype != left.dtype:
        if not autocast:
            raise TypeError(
                f"operator changed the dtype: operands {left.dtype}, result {merged.dtype}; "
                "convert the elements or the operator so that they agree (under autocast the result is cast back)"
            )
        merged = merged.to(left.dtype)
    return merged


def _checkpointed(merge: Operator, left: Rows, right: Rows) -> Rows:
    # The library's checkpoint replays random numbers and autocast; chunks bound what one recomputation holds.
    chunks = [
        recompute_in_backward(merge, some_left, some_right, use_reentrant=False)
        for some_left, some_right in zip(left.split(CHECKPOINT_ROWS), right.split(CHECKPOINT_ROWS), strict=True)
    ]
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks)
