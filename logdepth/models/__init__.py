"""The language models. A new one is one file here, one entry in `MODELS` and a member of the two unions.

Every model has `forward(tokens) -> logits`, `init_state(batch)` and `step(tokens, state) -> (logits, state)`.
"""

from torch import nn

from logdepth.models.scan_lm import ScanLM, ScanLMConfig, ScanLMState
from logdepth.models.transformer import KeyValueState, Transformer, TransformerConfig

ModelConfig = ScanLMConfig | TransformerConfig
LanguageModel = ScanLM | Transformer
ModelState = ScanLMState | KeyValueState

MODELS: dict[str, type[ModelConfig]] = {
    "scan-lm": ScanLMConfig,
    "transformer": TransformerConfig,
}
"""Name → config class; `MODELS["scan-lm"]().build(vocab_size)` is the model."""


def num_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


__all__ = [
    "MODELS",
    "KeyValueState",
    "LanguageModel",
    "ModelConfig",
    "ModelState",
    "ScanLM",
    "ScanLMConfig",
    "ScanLMState",
    "Transformer",
    "TransformerConfig",
    "num_parameters",
]
