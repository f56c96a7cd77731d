"""The language models. A new one is one file here and one entry in `MODELS`: recipes, tests and reports follow from it.

Every model has `forward(tokens) -> logits`, `init_state(batch)` and `step(tokens, state) -> (logits, state)`.
"""

from typing import TYPE_CHECKING, Any, Union

from logdepth.models.language_model import LanguageModel, ModelState, Size, num_parameters
from logdepth.models.scan_lm import ScanLM, ScanLMConfig, ScanLMState
from logdepth.models.transformer import KeyValueState, Transformer, TransformerConfig

MODELS: dict[str, Any] = {
    "scan-lm": ScanLMConfig,
    "transformer": TransformerConfig,
}
"""Name → config class; `MODELS["scan-lm"]().build(vocab_size)` is the model."""

if TYPE_CHECKING:
    from logdepth.models.language_model import ModelConfig
else:
    ModelConfig = Union[tuple(MODELS.values())]  # noqa: UP007  (what may stand in a run's config)

__all__ = [
    "MODELS",
    "KeyValueState",
    "LanguageModel",
    "ModelConfig",
    "ModelState",
    "ScanLM",
    "ScanLMConfig",
    "ScanLMState",
    "Size",
    "Transformer",
    "TransformerConfig",
    "num_parameters",
]
