"""Scans as a whole on a GPU: fused kernels around large matrix products, and a backward pass of their own."""

from logdepth.fused.known import why_unknown
from logdepth.fused.operators import OPERATORS, FusedOperator, why_not_fused

__all__ = ["OPERATORS", "FusedOperator", "why_not_fused", "why_unknown"]
