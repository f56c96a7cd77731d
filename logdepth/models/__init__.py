"""The language models. `LM` is made of blocks; the others are presets of it. A new one is one entry in `MODELS`."""

from typing import TYPE_CHECKING, Any, Union

from logdepth.models.language_model import LanguageModel, ModelState, Size, num_parameters
from logdepth.models.lm import LM, LMConfig, LMState
from logdepth.models.scan_lm import ScanLMConfig
from logdepth.models.transformer import TransformerConfig
from logdepth.models.unallocated import unallocated

MODELS: dict[str, Any] = {
    "scan-lm": ScanLMConfig,
    "transformer": TransformerConfig,
    "lm": LMConfig,
}
"""Name → config class; `MODELS["scan-lm"]().build(vocab_size)` is the model."""

if TYPE_CHECKING:
    from logdepth.models.language_model import ModelConfig
else:
    ModelConfig = Union[tuple(MODELS.values())]  # noqa: UP007  (what may stand in a run's config)

__all__ = [
    "LM",
    "MODELS",
    "LMConfig",
    "LMState",
    "LanguageModel",
    "ModelConfig",
    "ModelState",
    "ScanLMConfig",
    "Size",
    "TransformerConfig",
    "num_parameters",
    "unallocated",
]
