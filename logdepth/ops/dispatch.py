"""Where an op computes: in plain torch, or in a Triton kernel.

An op takes its kernel where the tensors' device and dtype allow it, without being asked. `kernels(False)` turns all
kernels off, for second derivatives or to compare. On a machine without a GPU, kernels can run in Triton's interpreter
(TRITON_INTERPRET=1 before the first is imported). That is slow, so there they must be asked for: `kernels(True)`.
Triton itself is imported when the first kernel is wanted.
"""

import functools
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that kernels read and write. They compute in float32."""


class _Switch(threading.local):
    enabled: bool | None = None


_switch = _Switch()


@contextmanager
def kernels(enabled: bool | None = True) -> Iterator[None]:
    """A scope in which ops use kernels wherever they can (True), never (False), or on CUDA only (None, as outside)."""
    outer, _switch.enabled = _switch.enabled, enabled
    try:
        yield
    finally:
        _switch.enabled = outer


def use_kernels(x: Tensor) -> bool:
    """Whether ops on this tensor run as kernels."""
    if torch.compiler.is_compiling():  # compiled code has kernels of its own
        return False
    enabled = x.is_cuda if _switch.enabled is None else _switch.enabled
    return enabled and why_no_kernels(x) is None


def why_no_kernels(x: Tensor) -> str | None:
    """None where kernels can compute with this tensor; otherwise the reason in one line."""
    if torch._C._are_functorch_transforms_active():
        return "kernels do not support torch.func transforms"
    if x.dtype not in DTYPES:
        return f"kernels compute in float32 at most; this tensor is {x.dtype}"
    if not runnable_on(x.device):
        return f"kernels need a CUDA GPU and Triton; this device is {x.device.type}"
    return None


def runnable_on(device: torch.device) -> bool:
    """Whether kernels can run on tensors of this device."""
    return _triton_is_installed() and (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1")


@functools.cache
def _triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def on_device_of(tensor: Tensor) -> AbstractContextManager[object]:
    """Makes the tensor's GPU the current one, which is where kernels are launched."""
    here = not tensor.is_cuda or torch.compiler.is_compiling()
    return nullcontext() if here else torch.cuda.device(tensor.device)


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def is_unmodified(module: nn.Module, parts: Mapping[str, type]) -> bool:
    """Whether a kernel may read the module's weights instead of calling its parts.

    That is so where its parts are exactly of the classes in `parts`, by their names in `named_modules`, and none lacks
    a parameter, or has a hook or a `forward` of its own.
    """
    found = dict(module.named_modules())
    return {name: type(part) for name, part in found.items()} == parts and not any(
        is_intercepted(part) or None in part._parameters.values() for part in found.values()
    )


def is_intercepted(module: nn.Module) -> bool:
    """Whether a call of the module does something else than its class does: it has a hook or a `forward` of its own."""
    return "forward" in vars(module) or any(getattr(module, hooks) for hooks in _HOOKS)


def backward_by_kernels(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates the backward pass of a Function that runs as kernels: it refuses double backward, and autocast is off.

    torch's `once_differentiable` refuses only when a second backward pass reaches the node. A pass that asks for the
    gradients of some tensors may not reach it, and would return wrong ones.
    """

    @functools.wraps(backward)
    def once(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "kernels do not support create_graph=True, because second derivatives would be lost; "
                "compute inside `with logdepth.ops.kernels(False):`"
            )
        one = next(grad for grad in grads if grad is not None)
        with torch.autocast(one.device.type, enabled=False), on_device_of(one):
            return backward(ctx, *grads)

    return once


P = ParamSpec("P")
R = TypeVar("R")


def outside_compiled_graphs(function: Callable[P, R]) -> Callable[P, R]:
    """Break the compiled graph around `function`, because tracing all levels would take minutes for each new length.

    torch.compiler.disable takes more than a second to import, so it is applied only within compiled code.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return, no-untyped-call]
        return function(*args, **kwargs)

    return call
