"""Recipes: functions that return a run's config, one for each model on each corpus, as in the paper's tables.

`SETTINGS` contains the settings of each corpus, a column of the paper's tables. The configs in `MODELS` define the
rows. A new corpus, model or operator therefore has recipes as soon as it is listed. To vary a recipe, apply
`dataclasses.replace` to the config that it returns. docs/paper-to-code.md explains values that the paper does not give.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from logdepth.architectures import ARCHITECTURES, architecture_run
from logdepth.architectures import CORPUS as CORPUS_OF_ARCHITECTURES
from logdepth.atomic import read_json
from logdepth.blocks import AttentionConfig, MLPConfig, ScanConfig
from logdepth.checksums import CHECKSUM, unseal
from logdepth.config import override
from logdepth.data import CORPORA, DataConfig, TokenizerConfig
from logdepth.errors import UserError, did_you_mean
from logdepth.models import MODELS, LMConfig, ModelConfig, ScanLMConfig, Size, num_parameters, unallocated
from logdepth.runs import RunConfig, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Setting:
    """The settings of a corpus: a column of the paper's tables."""

    vocab_size: int
    size: Size
    train: TrainConfig
    """Training settings of the scan model."""
    baseline_rate: float
    """Peak learning rate of the other models. Their other training settings are the same."""

    def train_of(self, model: ModelConfig) -> TrainConfig:
        """Return the training settings of a model."""
        if isinstance(model, ScanLMConfig):
            return self.train
        return replace(self.train, learning_rate=self.baseline_rate)


PYDOCS = Setting(
    # Small enough to train within minutes on a laptop CPU.
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
    # The paper gives no learning rate; this is that of our prototype.
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
    # At most one epoch, because the corpus is large.
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
"""Maps corpora to settings. A corpus that is not listed has the settings of PTB."""


def rows_of(corpus: str) -> dict[str, ModelConfig]:
    """Return the models that are compared on a corpus, by their names in tables."""
    size = SETTINGS.get(corpus, PTB).size
    rows: dict[str, ModelConfig] = {}
    for model in MODELS.values():
        for name, row in model.rows(size).items():
            if name in rows:
                raise ValueError(f"two models in MODELS have a row '{name}'; rename one")
            rows[name] = row
    return rows


def rows_of_study(name: str) -> tuple[str, dict[str, ModelConfig]]:
    """Return the corpus and the models of a study: a corpus with the paper's models, or `architectures`."""
    if name == "architectures":
        return CORPUS_OF_ARCHITECTURES, dict(ARCHITECTURES)
    return name, rows_of(name)


def ordered_rows(corpus: str, rows: Iterable[str]) -> list[str]:
    """Return the names of all models of the study that has these rows on this corpus, in the order of its tables."""
    return list(ARCHITECTURES if set(rows) & ARCHITECTURES.keys() else rows_of(corpus))


HYBRID_SCAN_HEADS = 4


def _maker(corpus: str, model: ModelConfig) -> Callable[[], RunConfig]:
    def make() -> RunConfig:
        setting = SETTINGS.get(corpus, PTB)
        # Users expect their own text back as it was, with its lines.
        tokenizer = TokenizerConfig(vocab_size=setting.vocab_size, lossless=corpus == "text")
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
} | {f"{CORPUS_OF_ARCHITECTURES}-{row}": partial(architecture_run, row) for row in ARCHITECTURES}
"""Maps names to functions that return a config: the rows of the paper's tables and a hybrid, for every corpus, and the
architectures of equal size."""


def recipe(name: str, **changes: Any) -> RunConfig:
    """Return the config of a recipe by its name, with some fields changed: `recipe("ptb-ar-grc", **{"seed": 3})`."""
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
    """Read a file for --config.

    The file may be a sweep's best.json or sweep.json, a run's config.json, a result file, or a file with fields of a
    run's config. For a sweep.json, the changes of its best trial are returned. A checksum is verified if there is one.
    """
    content = read_json(file)
    if not isinstance(content, dict):
        raise UserError(f"{file}: expected a mapping of fields of a run's config; got a {type(content).__name__}")
    saved: dict[str, Any] = content
    if CHECKSUM in saved:
        saved = unseal(saved, file, f'make it again, or, to use your edits, remove its "{CHECKSUM}" line')
    if not saved.keys() & {"best", "best_config", "trials", "space"}:
        return saved
    if not isinstance(saved.get("recipe"), str) or not {"best", "best_config"} <= saved.keys():
        raise UserError(
            f"{file} is a sweep.json that is damaged or was written by an older logdepth; use the sweep's best.json"
        )
    if saved["best"] is None:
        raise UserError(f"{file} is the sweep.json of a sweep without a complete trial; continue that sweep first")
    return {"recipe": saved["recipe"], "config": saved["best_config"]}


def parameters_of(config: RunConfig) -> int:
    """Count the parameters of a config's model without allocating them."""
    with unallocated():
        return num_parameters(config.model.build(config.data.tokenizer.vocab_size))
