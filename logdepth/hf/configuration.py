"""LogDepthConfig: the config of any model of the library, as Hugging Face stores it."""

from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedConfig

from logdepth.config import from_dict, to_dict
from logdepth.models import LMConfig, ModelConfig, ScanLMConfig


@dataclass(frozen=True, kw_only=True)
class _Named:
    """A model's config in a field, so that its kind is stored with it."""

    model: ModelConfig = field(default_factory=ScanLMConfig)


class LogDepthConfig(PreTrainedConfig):
    """The config of a model of the library: an LMConfig, or one of its presets.

    Args:
        vocab_size: number of tokens.
        model: the model's config, or the same as plain data: the fields, and the name of the class under `kind`.
        run: where the weights come from, if they were exported from a run: its config, its step and its token store.
        use_cache: whether calls in eval mode return the state after the tokens.
        fields: those that every config has.
    """

    model_type = "logdepth"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012  (as the base class has it)

    def __init__(
        self,
        vocab_size: int = 1_500,
        model: ModelConfig | dict[str, Any] | None = None,
        run: dict[str, Any] | None = None,
        use_cache: bool = True,
        **fields: Any,
    ) -> None:
        fields.pop("auto_map", None)  # that of modeling_logdepth.py, which sets it itself
        named = from_dict(_Named, {"model": model}) if isinstance(model, dict) else _Named(**_given(model))
        self.vocab_size, self.run, self.use_cache = vocab_size, run, use_cache
        self.model: dict[str, Any] = to_dict(named)["model"]
        tied = self.lm_config().tied
        if fields.pop("tie_word_embeddings", tied) != tied:
            raise ValueError(f"tie_word_embeddings must be {tied}, as the model's config says")
        super().__init__(**fields)
        self.tie_word_embeddings = tied

    def model_config(self) -> ModelConfig:
        """The model's config as the library has it."""
        return from_dict(_Named, {"model": self.model}).model

    def lm_config(self) -> LMConfig:
        """The same as a tuple of blocks."""
        config: Any = self.model_config()
        found: LMConfig = config if isinstance(config, LMConfig) else config.as_lm()
        return found

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.lm_config().dim

    @property
    def num_hidden_layers(self) -> int:
        """Number of blocks."""
        config = self.lm_config()
        return config.repeats * len(config.blocks)


def _given(model: ModelConfig | None) -> dict[str, ModelConfig]:
    return {} if model is None else {"model": model}
