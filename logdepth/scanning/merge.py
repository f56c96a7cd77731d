"""The contract with an operator: what `scan` accepts, and what it checks of every answer.

An operator is any callable (left, right) -> merged on `[rows, width]`, left earlier in time. This file knows
nothing of trees, lengths or states.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from logdepth.scanning.recompute import merge_and_recompute
from logdepth.shapes import Rows

Operator = Callable[[Rows, Rows], Rows]
OperatorPair = tuple[Operator, Operator]


def operator_pair(operator: Operator | OperatorPair) -> OperatorPair:
    """`(up, down)`: the operator of block merges and carries, and that of folds onto a prefix."""
    if callable(operator):
        return operator, operator
    if isinstance(operator, tuple | list) and len(operator) == 2 and all(callable(one) for one in operator):
        return operator[0], operator[1]
    got = f"{type(operator).__name__} of {len(operator)}" if isinstance(operator, tuple | list) else repr(operator)
    raise TypeError(f"operator must be a callable (left, right) -> merged, or a pair (up, down) of them; got {got}")


def checked_pair(operator: Operator | OperatorPair, device: torch.device, checkpoint: bool) -> OperatorPair:
    """The pair with every answer checked, and recomputed in the backward pass where `checkpoint` is set."""
    autocast = torch.is_autocast_enabled(device.type)
    recompute = checkpoint and torch.is_grad_enabled()

    def prepare(operator: Operator) -> Operator:
        merge = partial(_checked, operator, autocast)
        return partial(merge_and_recompute, merge, operator) if recompute else merge

    up, down = operator_pair(operator)
    prepared = prepare(up)
    return prepared, prepared if down is up else prepare(down)


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
