"""Building a model without memory or values for its weights, to count, load or restore them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

FILLS = {"normal_", "uniform_", "kaiming_uniform_"}
"""In-place functions that fill a tensor with first values. On the meta device they would take time to compute nothing;
the first two would import torch's compiler, in about a second."""


@contextmanager
def unallocated() -> Iterator[None]:
    """A scope in which models are built on the meta device; see `LanguageModel.allocate`."""
    with torch.device("meta"), _Unfilled():
        yield


class _Unfilled(TorchFunctionMode):
    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__name__", "") in FILLS:
            return args[0] if args else kwargs["tensor"]  # as torch.nn.init passes it on
        return function(*args, **kwargs)
