"""Scans as a whole on a GPU: fused kernels around large matrix products, and a backward pass of their own."""

from logdepth.fused.as_built import why_changed
from logdepth.fused.operators import FusedOperator, why_not_fused

__all__ = ["FusedOperator", "why_changed", "why_not_fused"]
