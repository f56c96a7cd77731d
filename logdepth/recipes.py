"""Recipes: every model on every corpus, as the paper's tables have them. A recipe is a function that returns a config.

`SETTINGS` has a column of the paper's tables for each corpus; the rows are what the configs in `MODELS` call theirs. So
a new corpus, model or operator has its recipes as soon as it is in its list. A variant is `dataclasses.replace` on what
a recipe returns. Where the paper gives no number, ours stands beside the reason in docs/paper-to-code.md.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from logdepth.atomic import read_json
from logdepth.blocks import AttentionConfig, MLPConfig, ScanConfig
from logdepth.config import override
from logdepth.data import CORPORA, DataConfig, TokenizerConfig
from logdepth.errors import UserError, did_you_mean
from logdepth.models import MODELS, LMConfig, ModelConfig, ScanLMConfig, Size, num_parameters
from logdepth.runs import RunConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A column of the paper's tables."""

    vocab_size: int
    size: Size
    train: TrainConfig
    """Of a ScanLM."""
    baseline_rate: float
    """Peak learning rate of the other models; the rest of their training is the same."""

    def train_of(self, model: ModelConfig) -> TrainConfig:
        if isinstance(model, ScanLMConfig):
            return self.train
        return replace(self.train, learning_rate=self.baseline_rate)


PYDOCS = Setting(
    # Small enough for minutes on a laptop's processor.
    vocab_size=1_000,
    size=Size(embed_width=128, state_width=128, layer_width=128, num_layers=4, num_heads=4),
    train=TrainConfig(
        learning_rate=2e-3,
        weight_decay=0.1,
        warmup_steps=50,
        max_steps=500,
        batch_size=16,
        context=128,
        evaluate_every=125,
    ),
    baseline_rate=2e-3,
)
PTB = Setting(
    # The paper gives no learning rate; ours is the prototype's.
    vocab_size=1_500,
    size=Size(
        embed_width=256, state_width=256, dropout=0.1, layer_width=192, num_layers=8, num_heads=6, layer_dropout=0.1
    ),
    train=TrainConfig(learning_rate=1e-3, warmup_steps=0, epochs=50),
    baseline_rate=1e-3,
)
WIKITEXT2 = Setting(
    vocab_size=8_000,
    size=Size(
        embed_width=512,
        state_width=512,
        dropout=0.1,
        layer_width=512,
        num_layers=3,
        num_heads=16,
        layers_tied=False,
        layer_dropout=0.3,
    ),
    train=TrainConfig(learning_rate=1e-4, warmup_steps=300, epochs=50),
    baseline_rate=1e-4,
)
WEB = Setting(
    # One pass at most: the corpus is too large for epochs. Validation every 2,000 steps.
    vocab_size=50_000,
    size=Size(
        embed_width=768,
        state_width=1536,
        nets=False,
        layer_width=768,
        num_layers=8,
        num_heads=12,
        layer_dropout=0.15,
    ),
    train=TrainConfig(learning_rate=5e-4, warmup_steps=2_000, epochs=1, evaluate_every=2_000),
    baseline_rate=2e-4,
)

SETTINGS: dict[str, Setting] = {
    "pydocs": PYDOCS,
    "ptb": PTB,
    "wikitext2": WIKITEXT2,
    "wikitext2_raw": WIKITEXT2,
    "openwebtext2": WEB,
    "webmix": WEB,
}
"""Corpus → setting. A corpus that is not here has PTB's."""


def rows_of(corpus: str) -> dict[str, ModelConfig]:
    """The models that are compared on a corpus, by the names that they have in tables."""
    size = SETTINGS.get(corpus, PTB).size
    rows: dict[str, ModelConfig] = {}
    for model in MODELS.values():
        for name, row in model.rows(size).items():
            if name in rows:
                raise ValueError(f"two models in MODELS have a row '{name}'")
            rows[name] = row
    return rows


HYBRID_SCAN_HEADS = 4


def _maker(corpus: str, model: ModelConfig) -> Callable[[], RunConfig]:
    def make() -> RunConfig:
        setting = SETTINGS.get(corpus, PTB)
        tokenizer = TokenizerConfig(vocab_size=setting.vocab_size)
        data = DataConfig(corpus=corpus, tokenizer=tokenizer)
        return RunConfig(data=data, model=model, train=setting.train_of(model))

    return make


def hybrid(corpus: str) -> LMConfig:
    """A scan, attention in a window of 128 tokens and an MLP, twice, as wide as the corpus's Transformer."""
    size = SETTINGS.get(corpus, PTB).size
    heads, dropout = size.num_heads, size.layer_dropout
    return LMConfig(
        dim=size.layer_width,
        blocks=(
            ScanConfig(heads=HYBRID_SCAN_HEADS, dropout=dropout),
            AttentionConfig(heads=heads, window=128, dropout=dropout),
            MLPConfig(dropout=dropout),
        ),
        repeats=2,
        embed_dropout=dropout,
    )


CORPUS_NAMES = (*SETTINGS, *(name for name in CORPORA if name not in SETTINGS))
"""All corpora, those with settings of their own first."""

RECIPES: dict[str, Callable[[], RunConfig]] = {
    f"{corpus}-{row}": _maker(corpus, model)
    for corpus in CORPUS_NAMES
    for row, model in (*rows_of(corpus).items(), ("hybrid", hybrid(corpus)))
}
"""Name → function. The rows of the paper's tables, and a hybrid of several kinds of blocks, for every corpus."""


def recipe(name: str, **changes: Any) -> RunConfig:
    """The config of a recipe, by name, with some fields changed: `recipe("ptb-ar-grc", **{"train.epochs": 3})`."""
    if name not in RECIPES:
        raise UserError(f"there is no recipe '{name}'{did_you_mean(name, RECIPES)}")
    nested: dict[str, Any] = {}
    for field, value in changes.items():
        *path, last = field.split(".")
        inner = nested
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = str(value) if isinstance(value, Path) else value
    return override(RECIPES[name](), nested, name) if nested else RECIPES[name]()


def changes_in(file: Path) -> dict[str, Any]:
    """What a file for --config says: of a sweep, its best; the config.json of a run, a result file or one's own."""
    said: Any = read_json(file)
    if not isinstance(said, dict):
        raise UserError(f"{file}: expected a mapping of fields of a run's config")
    if not said.keys() & {"best", "best_config", "trials", "space"}:
        return said
    if not isinstance(said.get("recipe"), str) or not {"best", "best_config"} <= said.keys():
        raise UserError(f"{file} is a damaged record of a sweep, or one of an older logdepth; use its best.json")
    if said["best"] is None:
        raise UserError(f"{file} is the record of a sweep that has no complete trial yet; go on with that sweep")
    return {"recipe": said["recipe"], "config": said["best_config"]}


def parameters_of(config: RunConfig) -> int:
    """How many parameters the model of a config has, without building it."""
    with torch.device("meta"):
        return num_parameters(config.model.build(config.data.tokenizer.vocab_size))
