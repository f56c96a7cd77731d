"""MLP-LDRU: the module, its fused merges beside it, and their kernel."""

from logdepth.operators.mlp_ldru.mlp_ldru import MLPLDRU, MLPLDRUConfig

__all__ = ["MLPLDRU", "MLPLDRUConfig"]
