"""The operators that come with the project. A new one is one file here and one entry in `OPERATORS`."""

from typing import TYPE_CHECKING, Any, Protocol, Union

from torch import nn

from logdepth.operators.affine import AffineConfig, AffineOperator
from logdepth.operators.grc import GRC, GRCConfig
from logdepth.operators.mlp_ldru import MLPLDRU, MLPLDRUConfig
from logdepth.operators.post_merge import PostMerge, PostMergeConfig

OPERATORS: dict[str, Any] = {
    "grc": GRCConfig,
    "mlp-ldru": MLPLDRUConfig,
    "affine": AffineConfig,
}
"""Name → config class; `OPERATORS["grc"](width=256).build()` is the operator."""

if TYPE_CHECKING:

    class OperatorConfig(Protocol):
        """The config of an operator; frozen, keyword-only, strict about its values."""

        @property
        def width(self) -> int: ...

        def build(self) -> nn.Module: ...
else:
    OperatorConfig = Union[tuple(OPERATORS.values())]  # noqa: UP007  (what may stand in a model's config)

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
