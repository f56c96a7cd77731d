"""Scans as a whole by kernels, for any operator that has a `Cell`. Triton is imported when the first of them runs."""

from logdepth.operators.fused.operator import FusedOperator

__all__ = ["FusedOperator"]
