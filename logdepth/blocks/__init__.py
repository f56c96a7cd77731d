"""The blocks that stand between embedding and head. A new one is one file here and one entry in `BLOCKS`."""

from typing import TYPE_CHECKING, Any, Union

from logdepth.blocks.attention import AttentionBlock, AttentionConfig, KeyValueState
from logdepth.blocks.block import Block, BlockState, StaticState, TensorState
from logdepth.blocks.layout import Layout, StepLayout
from logdepth.blocks.memory import MemoryBlock, MemoryConfig, MemoryLayer
from logdepth.blocks.mlp import MLPBlock, MLPConfig
from logdepth.blocks.paper_layer import PaperLayer, PaperLayerConfig
from logdepth.blocks.scan import ScanBlock, ScanConfig, ScanLayer

BLOCKS: dict[str, Any] = {
    "scan": ScanConfig,
    "memory": MemoryConfig,
    "paper-layer": PaperLayerConfig,
    "attention": AttentionConfig,
    "mlp": MLPConfig,
}
"""Name → config class; `BLOCKS["mlp"]().build(dim)` is the block."""

if TYPE_CHECKING:
    from logdepth.blocks.block import BlockConfig
else:
    BlockConfig = Union[tuple(BLOCKS.values())]  # noqa: UP007  (what may be in a model's config)

__all__ = [
    "BLOCKS",
    "AttentionBlock",
    "AttentionConfig",
    "Block",
    "BlockConfig",
    "BlockState",
    "KeyValueState",
    "Layout",
    "MLPBlock",
    "MLPConfig",
    "MemoryBlock",
    "MemoryConfig",
    "MemoryLayer",
    "PaperLayer",
    "PaperLayerConfig",
    "ScanBlock",
    "ScanConfig",
    "ScanLayer",
    "StaticState",
    "StepLayout",
    "TensorState",
]
