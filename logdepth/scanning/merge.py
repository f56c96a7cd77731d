"""The operator interface: what `scan` accepts, and what it checks in every result.

An operator is any callable (left, right) -> merged on `[rows, width]`, with left earlier in time. If it has an integer
attribute `width`, that is checked too.
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
    """Return `(up, down)`: the operator that merges blocks, and the operator that folds a block onto a prefix."""
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
    """Wrap the operators so that results are checked; with `checkpoint`, the backward pass also recomputes merges."""
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
    """Raise a ValueError if the operator declares another width than that of the elements."""
    width = getattr(operator, "width", None)
    if isinstance(width, int) and width != elements.shape[-1]:
        raise ValueError(f"operator has width {width}, but elements have width {elements.shape[-1]}")


def _check(operator: Operator, left: Rows, right: Rows) -> Rows:
    """Call the operator and check its result."""
    merged = _call(operator, left, right)
    _check_place(merged, left)
    if merged.dtype != left.dtype:
        raise TypeError(
            f"operator changed the dtype: operands {left.dtype}, result {merged.dtype}; "
            "convert the elements or the operator so that they agree (under autocast the result is cast back)"
        )
    return merged


def _check_under_autocast(operator: Operator, left: Rows, right: Rows) -> Rows:
    """Call the operator, check its result, and cast a result in autocast's dtype back to the operands' dtype."""
    merged = _call(operator, left, right)
    _check_place(merged, left)
    if merged.dtype != left.dtype and not (merged.is_floating_point() and left.is_floating_point()):
        raise TypeError(f"operator changed the dtype: operands {left.dtype}, result {merged.dtype}, not by autocast")
    return merged.to(left.dtype)


def _call(operator: Operator, left: Rows, right: Rows) -> Rows:
    """Call the operator, and refuse one that changes its operands in place: other merges read them too."""
    before = _versions(left, right)
    merged = operator(left, right)
    if _versions(left, right) != before:
        raise ValueError("operator changed its operands in place; return a new tensor instead")
    return merged


def _versions(left: Rows, right: Rows) -> tuple[int, int] | None:
    """How often each was changed in place. Inference tensors and compilers do not count that."""
    if torch.compiler.is_compiling() or left.is_inference() or right.is_inference():
        return None
    return left._version, right._version


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
