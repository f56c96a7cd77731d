"""Conversion of integer arguments: Python lists, NumPy arrays, or tensors on any device."""

import reprlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from logdepth.scanning.lengths import Ints

LengthsLike = Sequence[int] | Tensor | NDArray[np.integer]


def integers(name: str, values: LengthsLike) -> Ints:
    """Return a copy of the integers as a flat array. Errors refer to the argument by `name`."""
    listed = values.tolist() if isinstance(values, Tensor) else values
    try:
        array = np.array(listed)
    except (TypeError, ValueError):
        array = np.array(None)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, dtype=np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        what = f"{values.dtype} of shape {tuple(values.shape)}" if isinstance(values, Tensor) else reprlib.repr(values)
        raise TypeError(f"{name} must be a flat list of integers; got {what}")
    return array.astype(np.int64)
