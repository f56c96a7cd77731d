"""The contract with an operator: what `scan` accepts, and what it checks of every answer.

An operator is any callable (left, right) -> merged on `[rows, width]`, left earlier in time; where it has an attribute
`width`, that is checked too. This file knows nothing of trees, lengths or states.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from logdepth.scanning.recompute import merge_and_recompute
from logdepth.shapes import Rows

Operator = Callable[[Rows, Rows], Rows]
OperatorPair = tuple[Operator, Operator]


def operator_pair(operator: Operator | OperatorPair) -> OperatorPair:
    """`(up, down)`: the operator of block merges and carries, and that of folds onto a prefix."""
    if isinstance(operator, tuple | list | nn.ModuleList):
        if len(operator) == 2 and all(callable(one) for one in operator):
            return operator[0], operator[1]
        got = f"{type(operator).__name__} of {len(operator)}"
    elif isinstance(operator, type):
        got = f"the class {operator.__name__}, not an instance"
    elif callable(operator):
        return operator, operator
    else:
        got = repr(operator)
    raise TypeError(f"operator must be a callable (left, right) -> merged, or a pair (up, down) of them; got {got}")


def checked_pair(operator: Operator | OperatorPair, elements: Tensor, checkpoint: bool) -> OperatorPair:
    """The pair with every answer checked, and recomputed in the backward pass where `checkpoint` is set."""
    up, down = operator_pair(operator)
    device = elements.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    check = _check_under_autocast if autocast else _check
    merge = partial(merge_and_recompute, check) if checkpoint and torch.is_grad_enabled() else check
    for one in (up,) if down is up else (up, down):
        check_width(one, elements)
    checked_up = partial(merge, up)
    return checked_up, checked_up if down is up else partial(merge, down)


def check_width(operator: object, elements: Tensor) -> None:
    """Refuse an operator that says it has another width."""
    width = getattr(operator, "width", None)
    if isinstance(width, int) and width != elements.shape[-1]:
        raise ValueError(f"operator has width {width}, but elements have width {elements.shape[-1]}")


def _check(operator: Operator, left: Rows, right: Rows) -> Rows:
    """The operator's answer, or an error that says what is wrong with it."""
    merged = operator(left, right)
    _check_place(merged, left)
    if merged.dtype != left.dtype:
        raise TypeError(
            f"operator changed the dtype: operands {left.dtype}, result {merged.dtype}; "
            "convert the elements or the operator so that they agree (under autocast the result is cast back)"
        )
    return merged


def _check_under_autocast(operator: Operator, left: Rows, right: Rows) -> Rows:
    """The same, where the operator may answer in autocast's dtype: the answer is cast back."""
    merged = operator(left, right)
    _check_place(merged, left)
    if merged.dtype != left.dtype and not (merged.is_floating_point() and left.is_floating_point()):
        raise TypeError(f"operator changed the dtype: operands {left.dtype}, result {merged.dtype}, not by autocast")
    return merged.to(left.dtype)


def _check_place(merged: Rows, left: Rows) -> None:
    if not isinstance(merged, Tensor):
        raise TypeError(f"operator must return a tensor of shape {tuple(left.shape)}; got {type(merged).__name__}")
    if merged.shape != left.shape:
        raise ValueError(
            f"operator changed the shape: operands {tuple(left.shape)}, result {tuple(merged.shape)}; "
            "it must map [rows, width] and [rows, width] to [rows, width]"
        )
    if merged.device != left.device:
        raise ValueError(f"operator changed the device: operands on {left.device}, result on {merged.device}")
