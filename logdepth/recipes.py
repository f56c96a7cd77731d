"""Recipes: a function for each row of the paper's tables, which returns the config of that run.

A variant is `dataclasses.replace` on what a recipe returns. Where the paper gives no number, ours stands beside the
reason in docs/paper-to-code.md.
"""

from collections.abc import Callable
from dataclasses import replace

from logdepth.data import DataConfig, TokenizerConfig
from logdepth.errors import UserError, did_you_mean
from logdepth.models import ModelConfig, ScanLMConfig, TransformerConfig
from logdepth.operators import GRCConfig, MLPLDRUConfig
from logdepth.runs import RunConfig, TrainConfig


def ptb_ar_grc() -> RunConfig:
    return _ptb(_scan_lm(256, dropout=0.1))


def ptb_ar_mlp_ldru() -> RunConfig:
    return _ptb(_mlp_ldru(256, dropout=0.1))


def ptb_transformer_alibi() -> RunConfig:
    model = TransformerConfig(embed_width=192, num_layers=8, num_heads=6, dropout=0.1)
    return _ptb(model)


def ptb_transformer_sinusoidal() -> RunConfig:
    return _sinusoidal(ptb_transformer_alibi())


def wikitext2_ar_grc() -> RunConfig:
    return _wikitext2(_scan_lm(512, dropout=0.1), learning_rate=1e-4)


def wikitext2_ar_mlp_ldru() -> RunConfig:
    return _wikitext2(_mlp_ldru(512, dropout=0.1), learning_rate=1e-4)


def wikitext2_transformer_alibi() -> RunConfig:
    model = TransformerConfig(embed_width=512, num_layers=3, num_heads=16, tied=False, dropout=0.3)
    return _wikitext2(model, learning_rate=1e-4)


def wikitext2_transformer_sinusoidal() -> RunConfig:
    return _sinusoidal(wikitext2_transformer_alibi())


def openwebtext2_ar_grc() -> RunConfig:
    return _web("openwebtext2", _large_scan_lm(GRCConfig(width=1536)), learning_rate=5e-4)


def openwebtext2_ar_mlp_ldru() -> RunConfig:
    return _web("openwebtext2", _large_scan_lm(MLPLDRUConfig(width=1536)), learning_rate=5e-4)


def openwebtext2_transformer_alibi() -> RunConfig:
    model = TransformerConfig(embed_width=768, num_layers=8, num_heads=12, dropout=0.15)
    return _web("openwebtext2", model, learning_rate=2e-4)


def openwebtext2_transformer_sinusoidal() -> RunConfig:
    return _sinusoidal(openwebtext2_transformer_alibi())


def webmix_ar_grc() -> RunConfig:
    return _on_webmix(openwebtext2_ar_grc())


def webmix_ar_mlp_ldru() -> RunConfig:
    return _on_webmix(openwebtext2_ar_mlp_ldru())


def webmix_transformer_alibi() -> RunConfig:
    return _on_webmix(openwebtext2_transformer_alibi())


def webmix_transformer_sinusoidal() -> RunConfig:
    return _on_webmix(openwebtext2_transformer_sinusoidal())


def pydocs_ar_grc() -> RunConfig:
    return _pydocs(_scan_lm(128))


def pydocs_ar_mlp_ldru() -> RunConfig:
    return _pydocs(_mlp_ldru(128))


def pydocs_transformer_alibi() -> RunConfig:
    return _pydocs(TransformerConfig(embed_width=128, num_layers=4, num_heads=4))


def pydocs_transformer_sinusoidal() -> RunConfig:
    return _sinusoidal(pydocs_transformer_alibi())


RECIPES: dict[str, Callable[[], RunConfig]] = {
    "pydocs-ar-grc": pydocs_ar_grc,
    "pydocs-ar-mlp-ldru": pydocs_ar_mlp_ldru,
    "pydocs-transformer-alibi": pydocs_transformer_alibi,
    "pydocs-transformer-sinusoidal": pydocs_transformer_sinusoidal,
    "ptb-ar-grc": ptb_ar_grc,
    "ptb-ar-mlp-ldru": ptb_ar_mlp_ldru,
    "ptb-transformer-alibi": ptb_transformer_alibi,
    "ptb-transformer-sinusoidal": ptb_transformer_sinusoidal,
    "wikitext2-ar-grc": wikitext2_ar_grc,
    "wikitext2-ar-mlp-ldru": wikitext2_ar_mlp_ldru,
    "wikitext2-transformer-alibi": wikitext2_transformer_alibi,
    "wikitext2-transformer-sinusoidal": wikitext2_transformer_sinusoidal,
    "openwebtext2-ar-grc": openwebtext2_ar_grc,
    "openwebtext2-ar-mlp-ldru": openwebtext2_ar_mlp_ldru,
    "openwebtext2-transformer-alibi": openwebtext2_transformer_alibi,
    "openwebtext2-transformer-sinusoidal": openwebtext2_transformer_sinusoidal,
    "webmix-ar-grc": webmix_ar_grc,
    "webmix-ar-mlp-ldru": webmix_ar_mlp_ldru,
    "webmix-transformer-alibi": webmix_transformer_alibi,
    "webmix-transformer-sinusoidal": webmix_transformer_sinusoidal,
}


def recipe(name: str) -> RunConfig:
    """The config of a recipe, by name."""
    if name not in RECIPES:
        raise UserError(f"there is no recipe '{name}'{did_you_mean(name, RECIPES)}")
    return RECIPES[name]()


def _scan_lm(width: int, dropout: float = 0.0) -> ScanLMConfig:
    """The paper's model with both nets, embedding and states of one width; post-merge net in the up-sweep."""
    operator = GRCConfig(width=width, dropout=dropout)
    return ScanLMConfig(embed_width=width, operator=operator, leaf_dropout=dropout, post_merge_dropout=dropout)


def _mlp_ldru(width: int, dropout: float = 0.0) -> ScanLMConfig:
    return replace(_scan_lm(width, dropout), operator=MLPLDRUConfig(width=width))


def _large_scan_lm(operator: GRCConfig | MLPLDRUConfig) -> ScanLMConfig:
    return ScanLMConfig(embed_width=768, operator=operator, embedding_net=False, post_merge="none")


def _ptb(model: ModelConfig) -> RunConfig:
    """The paper gives no learning rate for PTB; ours is the prototype's."""
    train = TrainConfig(learning_rate=1e-3, warmup_steps=0, epochs=50)
    return RunConfig(data=_data("ptb", 1_500), model=model, train=train)


def _wikitext2(model: ModelConfig, learning_rate: float) -> RunConfig:
    train = TrainConfig(learning_rate=learning_rate, warmup_steps=300, epochs=50)
    return RunConfig(data=_data("wikitext2", 8_000), model=model, train=train)


def _web(corpus: str, model: ModelConfig, learning_rate: float) -> RunConfig:
    """One pass at most: the corpus is too large for epochs. Validation every 2,000 steps."""
    train = TrainConfig(learning_rate=learning_rate, warmup_steps=2_000, epochs=1, evaluate_every=2_000)
    return RunConfig(data=_data(corpus, 50_000), model=model, train=train)


def _on_webmix(config: RunConfig) -> RunConfig:
    """OpenWebText2's row on the text that stands in for it."""
    return replace(config, data=replace(config.data, corpus="webmix"))


def _pydocs(model: ModelConfig) -> RunConfig:
    """Small enough for minutes on a laptop's processor."""
    train = TrainConfig(
        learning_rate=2e-3, weight_decay=0.1, warmup_steps=50, epochs=2, batch_size=16, context=128, evaluate_every=100
    )
    return RunConfig(data=_data("pydocs", 1_000), model=model, train=train)


def _sinusoidal(config: RunConfig) -> RunConfig:
    assert isinstance(config.model, TransformerConfig)
    return replace(config, model=replace(config.model, positions="sinusoidal"))


def _data(corpus: str, vocab_size: int) -> DataConfig:
    return DataConfig(corpus=corpus, tokenizer=TokenizerConfig(vocab_size=vocab_size))
