"""Ops: each is plain torch with its kernel beside it, and takes the kernel where device, dtype and shape allow it."""

from logdepth.ops.activation import ACTIVATIONS, ActivationName
from logdepth.ops.cross_entropy import linear_cross_entropy, token_losses
from logdepth.ops.delta_rule import DeltaChunk, delta_chunk, delta_chunks, delta_step, normalised
from logdepth.ops.dispatch import kernels, use_kernels, why_no_kernels
from logdepth.ops.linear import Linear, identity_linear, linear, scaled_linear
from logdepth.ops.lookup import FrozenTable, TokenLookup
from logdepth.ops.norm import LayerNorm, NormedLinear, NormName, RMSNorm, layer_norm, norm_named
from logdepth.ops.precision import Casts, product_dtype, using_casts, without_autocast
from logdepth.ops.short_conv import short_conv

__all__ = [
    "ACTIVATIONS",
    "ActivationName",
    "Casts",
    "DeltaChunk",
    "FrozenTable",
    "LayerNorm",
    "Linear",
    "NormName",
    "NormedLinear",
    "RMSNorm",
    "TokenLookup",
    "delta_chunk",
    "delta_chunks",
    "delta_step",
    "identity_linear",
    "kernels",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "norm_named",
    "normalised",
    "product_dtype",
    "scaled_linear",
    "short_conv",
    "token_losses",
    "use_kernels",
    "using_casts",
    "why_no_kernels",
    "without_autocast",
]
