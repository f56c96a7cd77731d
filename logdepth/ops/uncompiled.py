"""Functions that torch.compile leaves alone: what they call by themselves may still be compiled."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_compiled_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Break the graph around `function`: tracing its every level would take minutes, again for each new length.

    The library's own decorator takes more than a second to import; this one asks for it in compiled code alone.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]
        return function(*args, **kwargs)

    return call
