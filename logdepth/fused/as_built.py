"""Whether a module is still what was built: kernels read weights, and compute what its class computes with them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from logdepth.operators.activation import ACTIVATIONS

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
EMBEDDING_OPTIONS = ("padding_idx", "max_norm", "scale_grad_by_freq", "sparse")


def why_changed(module: nn.Module, build: Callable[[], nn.Module]) -> str | None:
    """None where all parts are of the very types of those of another such module, of any size; else what is not."""
    # Not on the meta device, where drawing weights imports torch's compiler; and without the caller's random numbers.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        built = build()
    parts, expected = (_parts_of(one) for one in (module, built))
    for name in dict.fromkeys((*expected, *parts)):
        what = f"{type(built).__name__}.{name}" if name else type(built).__name__
        kinds = [type_before_parametrizations(one[name]) if name in one else None for one in (parts, expected)]
        if kinds[0] is not kinds[1]:
            is_, was = (kind.__name__ if kind else "nothing" for kind in kinds)
            return f"fused kernels are for models as they are built: {what} is {is_} in place of {was}"
        if changed := _own_change(parts[name], expected[name]):
            return f"fused kernels are for models as they are built: {what} has {changed}"
    return None


def _parts_of(module: nn.Module) -> dict[str, nn.Module]:
    """Without what makes a weight of another, which is read as it is."""
    return {name: part for name, part in module.named_modules() if "parametrizations" not in name.split(".")}


def _own_change(part: nn.Module, built: nn.Module) -> str | None:
    """What makes one part compute something else than its type does."""
    if any(getattr(part, hooks) for hooks in HOOKS):
        return "hooks"
    if "forward" in vars(part):
        return "a forward of its own"
    for name, _ in built.named_parameters(recurse=False):
        if not isinstance(getattr(part, name, None), Tensor):
            return f"no {name}"
    if hasattr(built, "activation") and part.activation not in ACTIVATIONS.values():
        return f"an activation that is not among {', '.join(ACTIVATIONS)}"
    if isinstance(part, nn.Embedding):
        for option in EMBEDDING_OPTIONS:
            if getattr(part, option) != getattr(built, option):
                return f"{option}={getattr(part, option)}"
    return None
