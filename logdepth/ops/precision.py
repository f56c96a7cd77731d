"""The dtype of matrix products under autocast, and weights cast to it: all of a model at once, or one by one."""

import threading
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor

from logdepth.ops.dispatch import outside_compiled_graphs

Precision = Literal["auto", "float32", "bfloat16"]
DotPrecision = Literal["tf32", "tf32x3"]
"""How kernels multiply float32: rounded to 10 bits of mantissa, or as three such products, nearly exactly."""

ALIGNMENT = 64
"""Each copy starts at a multiple of this many elements."""


def rounds_products(precision: Precision, device: torch.device) -> bool:
    """Whether products are computed in 16 bits."""
    return precision == "bfloat16" or (precision == "auto" and device.type == "cuda")


def arithmetic(precision: Precision, device: torch.device) -> torch.autocast:
    """The autocast context for a precision."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=rounds_products(precision, device))


def product_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which a matrix product with this operand is computed: autocast's, where autocast is on."""
    device = x.device.type
    if x.dtype != torch.float64 and not x.is_meta and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return x.dtype


@outside_compiled_graphs
def dot_precision(x: Tensor | None = None) -> DotPrecision:
    """How kernels multiply float32 on tensor cores: rounded where torch is set to round its own products.

    Also where `x`, from which the operands are made, is rounded to 16 bits for its own products: that loses more.
    """
    low = x is not None and product_dtype(x).itemsize == 2
    return "tf32" if low or torch.backends.cuda.matmul.fp32_precision == "tf32" else "tf32x3"


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """A scope in which products with such tensors are computed in their own dtype."""
    device = x.device.type
    available = torch.amp.is_autocast_available(device)
    on = available and torch.is_autocast_enabled(device)  # where it is off, exported graphs need no scope of it
    return torch.autocast(device, enabled=False) if on else nullcontext()


class Casts:
    """Copies of weights in the dtype of products, made by a single call. They do not follow later changes."""

    def __init__(self, weights: Iterable[Tensor], dtype: torch.dtype) -> None:
        self.dtype = dtype
        others = [weight.detach() for weight in weights if weight.dtype != dtype and weight.is_floating_point()]
        self._copies: dict[tuple[int, torch.Size], Tensor] = {}
        if not others:
            return
        sizes = [-(-weight.numel() // ALIGNMENT) * ALIGNMENT for weight in others]
        parts = torch.split(torch.empty(sum(sizes), dtype=dtype, device=others[0].device), sizes)
        copies = [part[: weight.numel()].view(weight.shape) for part, weight in zip(parts, others, strict=True)]
        torch._foreach_copy_(copies, others)
        self._copies = {_key(weight): copy for weight, copy in zip(others, copies, strict=True)}

    def get(self, weight: Tensor) -> Tensor | None:
        return self._copies.get(_key(weight))


def _key(weight: Tensor) -> tuple[int, torch.Size]:
    return weight.data_ptr(), weight.shape  # a parameter and its detached alias share both


class _Current(threading.local):
    casts: Casts | None = None


_current = _Current()


@contextmanager
def using_casts(casts: Casts | None) -> Iterator[None]:
    """A scope in which `cast` finds these copies."""
    outer, _current.casts = _current.casts, casts
    try:
        yield
    finally:
        _current.casts = outer


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight in `dtype`, cut from the graph: a copy that is at hand, or a new one."""
    weight = weight.detach()
    if weight.dtype == dtype:
        return weight
    casts = _current.casts
    copy = casts.get(weight) if casts is not None and casts.dtype == dtype else None
    return weight.to(dtype) if copy is None else copy


def has_casts(dtype: torch.dtype) -> bool:
    """Whether copies in this dtype are at hand already."""
    return _current.casts is not None and _current.casts.dtype == dtype
