"""GRC: the module, its fused merges beside it, and their kernels."""

from logdepth.operators.grc.grc import GRC, GRCConfig

__all__ = ["GRC", "GRCConfig"]
