"""The paper's layer: which dtype its states have."""

import pytest
import torch

from logdepth.blocks import Layout, PaperLayerConfig, ScanConfig
from logdepth.operators import GRC, GRCConfig
from logdepth.ops import kernels

WIDTH = 8


@pytest.mark.parametrize("config", [PaperLayerConfig(operator=GRCConfig(width=WIDTH)), ScanConfig(heads=2)])
def test_autocast_does_not_decide_the_dtype_of_states(config: PaperLayerConfig | ScanConfig) -> None:
    """Kernels keep states in the dtype of products, except where a state came in; plain torch never does."""
    block, x = config.build(WIDTH), torch.randn(2, 5, WIDTH)
    layout = Layout(x.shape[:2])

    def dtype_of(state: object) -> torch.dtype:
        after = block(x, state, layout)[1]
        return (after if isinstance(config, PaperLayerConfig) else after.scans[0]).dtype

    with torch.autocast("cpu", torch.bfloat16):
        assert dtype_of(None) == torch.float32
        with kernels(True):
            assert dtype_of(None) == torch.bfloat16
            assert dtype_of(block.init_state(2)) == torch.float32
            for module in block.modules():
                if isinstance(module, GRC):
                    module.register_forward_hook(lambda *_: None)  # a modified operator runs plain
            assert dtype_of(None) == torch.float32
