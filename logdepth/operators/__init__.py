"""The operators that come with the project. A new one is one file here and one entry in `OPERATORS`."""

from logdepth.operators.affine import AffineConfig, AffineOperator
from logdepth.operators.grc import GRC, GRCConfig
from logdepth.operators.mlp_ldru import MLPLDRU, MLPLDRUConfig
from logdepth.operators.post_merge import PostMerge, PostMergeConfig

OperatorConfig = GRCConfig | MLPLDRUConfig | AffineConfig

OPERATORS: dict[str, type[OperatorConfig]] = {
    "grc": GRCConfig,
    "mlp-ldru": MLPLDRUConfig,
    "affine": AffineConfig,
}
"""Name → config class; `OPERATORS["grc"](width=256).build()` is the operator."""

__all__ = [
    "GRC",
    "MLPLDRU",
    "OPERATORS",
    "AffineConfig",
    "AffineOperator",
    "GRCConfig",
    "MLPLDRUConfig",
    "OperatorConfig",
    "PostMerge",
    "PostMergeConfig",
]
