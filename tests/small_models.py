"""Small models of every kind and option, for tests that hold for all of them."""

import dataclasses

import torch
from torch import nn

from logdepth.models import MODELS, ModelConfig, ScanLMConfig, Size, TransformerConfig
from logdepth.operators import OPERATORS, GRCConfig

VOCAB = 13
TINY = Size(embed_width=12, state_width=8, layer_width=16, num_layers=2, num_heads=4)
SCAN = ScanLMConfig(embed_width=12, operator=GRCConfig(width=8))
TRANSFORMER = TransformerConfig(embed_width=16, num_layers=2, num_heads=4)

SMALL_MODELS: dict[str, ModelConfig] = {
    **{name: row for config in MODELS.values() for name, row in config.rows(TINY).items()},
    "plain": dataclasses.replace(SCAN, embedding_net=False, post_merge="none", leaf_norm=False, input_residual=0.0),
    "every-merge": dataclasses.replace(SCAN, post_merge="every"),
    "deep": dataclasses.replace(SCAN, depth=3, tied=False),
    "recompute": dataclasses.replace(SCAN, depth=2, recompute=True),
    "affine": dataclasses.replace(SCAN, operator=OPERATORS["affine"](width=8)),
    "alibi-12-heads": dataclasses.replace(TRANSFORMER, embed_width=24, num_heads=12),
    "sinusoidal-untied": dataclasses.replace(TRANSFORMER, positions="sinusoidal", tied=False),
}


def enlarge(model: nn.Module, factor: float) -> None:
    """All weights: at the start those of a Transformer are so small that what it attends to hardly matters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
