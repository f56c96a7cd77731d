"""Whether a module is made of nothing but what kernels stand for."""

from collections.abc import Collection

from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from logdepth.operators.activation import ACTIVATIONS

PARTS = (nn.Linear, nn.LayerNorm, nn.Dropout, nn.Identity, nn.Sequential, nn.ModuleList, nn.Embedding)


def why_unknown(module: nn.Module, own: Collection[type[nn.Module]]) -> str | None:
    """None where all parts are of these very types or of torch's PARTS; else what is not: it may compute anything."""
    for name, part in module.named_modules():
        if "parametrizations" in name.split("."):  # it makes weights, which are read as they are
            continue
        what = name or type(module).__name__
        kind = type_before_parametrizations(part)
        if kind not in PARTS and kind not in own:
            return f"there are no fused kernels for {what}, a {kind.__name__}"
        if part._forward_hooks or part._forward_pre_hooks:
            return f"fused kernels would pass over the hooks of {what}"
        if isinstance(part, nn.Linear | nn.LayerNorm) and (part.weight is None or part.bias is None):
            return f"there are no fused kernels for {what}, a {type(part).__name__} without a weight or a bias"
        if isinstance(part, nn.Embedding) and part.max_norm is not None:
            return f"there are no fused kernels for {what}, an Embedding with max_norm"
        if getattr(part, "activation", None) not in (None, *ACTIVATIONS.values()):
            return f"there are fused kernels for {', '.join(ACTIVATIONS)}; {what} has another activation"
    return None
