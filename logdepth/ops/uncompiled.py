"""Functions that torch.compile does not trace. The functions that they call can still be compiled."""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def outside_compiled_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Break the compiled graph around `function`, because tracing all levels would take minutes for each new length.

    torch.compiler.disable takes more than a second to import, so it is applied only within compiled code.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]
        return function(*args, **kwargs)

    return call
