"""Small models of every kind and option, for tests that hold for all of them."""

import dataclasses

from logdepth.models import ModelConfig, ScanLMConfig, TransformerConfig
from logdepth.operators import OPERATORS, GRCConfig

VOCAB = 13
SCAN = ScanLMConfig(embed_width=12, operator=GRCConfig(width=8))
TRANSFORMER = TransformerConfig(embed_width=16, num_layers=2, num_heads=4)

SMALL_MODELS: dict[str, ModelConfig] = {
    "ar-grc": SCAN,
    "plain": dataclasses.replace(SCAN, embedding_net=False, post_merge="none", leaf_norm=False, input_residual=0.0),
    "every-merge": dataclasses.replace(SCAN, post_merge="every"),
    "deep": dataclasses.replace(SCAN, depth=3, tied=False),
    "recompute": dataclasses.replace(SCAN, depth=2, recompute=True),
    **{f"operator-{name}": dataclasses.replace(SCAN, operator=config(width=8)) for name, config in OPERATORS.items()},
    "alibi": TRANSFORMER,
    "alibi-12-heads": dataclasses.replace(TRANSFORMER, embed_width=24, num_heads=12),
    "sinusoidal": dataclasses.replace(TRANSFORMER, positions="sinusoidal", tied=False),
}
