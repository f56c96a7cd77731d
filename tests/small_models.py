"""Small models of every kind and option, for tests that hold for all of them."""

import dataclasses

import torch
from torch import nn

from logdepth.blocks import BLOCKS
from logdepth.models import LM, MODELS, LanguageModel, LMConfig, ModelConfig, ScanLMConfig, Size, TransformerConfig
from logdepth.operators import OPERATORS, GRCConfig

VOCAB = 13
TINY = Size(embed_width=12, state_width=8, layer_width=16, num_layers=2, num_heads=4)
SCAN = ScanLMConfig(embed_width=12, operator=GRCConfig(width=8))
TRANSFORMER = TransformerConfig(embed_width=16, num_layers=2, num_heads=4)

LM_BLOCKS: dict[str, tuple[str, ...]] = {
    "scan-heads": ("scan:heads=2", "mlp"),
    "scan-bare": ("scan:operator=mlp-ldru,conv=0,gate=false,norm=layer",),
    "scan-up": ("scan:heads=2,conv=2,post_merge=up,state_width=8",),
    "scan-every": ("scan:conv=1,post_merge=every,recompute=true",),
    "memory-chunk-4": ("memory:chunk=4,heads=2,write_strength=2", "mlp"),
    "memory-fold": ("memory:chunk=4,heads=2,reading=fold,write_strength=2,conv=2",),
    "memory-bare": ("memory:chunk=2,heads=3,levels=2,conv=0,gate=false,norm=layer,key_width=3,value_width=5",),
    "memory-chunk-1": ("memory:chunk=1,heads=1,conv=1",),
    "memory-summary": ("memory:chunk=2,heads=2,summary=3,summary_merge=grc,merge_gate=true",),
    "memory-window": ("memory:chunk=2,heads=2", "attention:heads=2,window=5", "mlp"),
    "scan-affine": ("scan:operator=affine,heads=3",),
    "paper-layer-blocks": ("paper-layer:operator.width=8,post_merge=up", "paper-layer:operator.width=6,residual=false"),
    "rope": ("attention:heads=2,qk_norm=true", "mlp:activation=swiglu,norm=layer,bias=true"),
    "rope-window-5": ("attention:heads=3,window=5",),
    "alibi-window-5": ("attention:heads=2,positions=alibi,window=5,bias=true,norm=layer", "mlp:activation=gelu"),
    "no-positions": ("attention:heads=2,positions=none,qk_norm=true", "mlp:multiple=1"),
    "window-1": ("attention:heads=2,positions=none,window=1", "scan:conv=3"),
    "plain-backend": (
        "attention:heads=2,backend=plain",
        "attention:heads=2,backend=plain,positions=alibi,window=5",
    ),
}
"""Blocks of models of width 12."""
HYBRID = LMConfig(
    dim=12,
    blocks=("scan:heads=2", "attention:heads=2,window=5", "mlp"),
    repeats=2,
    positions="sinusoidal",
    scale_embedding=True,
    norm="layer",
    tied=False,
    initialisation="gpt2",
)

SMALL_BLOCKS = {
    **{name: name for name in BLOCKS},
    "paper-layer": "paper-layer:operator.width=8",
    "memory": "memory:chunk=4",  # so that there are chunks to read
}
"""Every block with its defaults, for models of width 16: one that is added to `BLOCKS` is tested with the others."""

SMALL_MODELS: dict[str, ModelConfig] = {
    **{name: row for config in MODELS.values() for name, row in config.rows(TINY).items()},
    "plain": dataclasses.replace(SCAN, embedding_net=False, post_merge="none", leaf_norm=False, input_residual=0.0),
    "every-merge": dataclasses.replace(SCAN, post_merge="every"),
    "deep": dataclasses.replace(SCAN, depth=3, tied=False),
    "recompute": dataclasses.replace(SCAN, depth=2, recompute=True),
    "affine": dataclasses.replace(SCAN, operator=OPERATORS["affine"](width=8)),
    "alibi-12-heads": dataclasses.replace(TRANSFORMER, embed_width=24, num_heads=12),
    "sinusoidal-untied": dataclasses.replace(TRANSFORMER, positions="sinusoidal", tied=False),
    **{name: LMConfig(dim=12, blocks=blocks) for name, blocks in LM_BLOCKS.items()},
    **{f"only-{name}": LMConfig(dim=16, blocks=(text,)) for name, text in SMALL_BLOCKS.items()},
    "hybrid": HYBRID,
}


def small_model(name: str, vocab_size: int = VOCAB) -> LanguageModel:
    """The model of this name in float64 and eval mode, with the same weights at every call.

    Those of an LMConfig are off their first values: blocks whose output is zero would hide every error in them.
    """
    torch.manual_seed(1)
    model = SMALL_MODELS[name].build(vocab_size).double().eval()
    config = model.config if isinstance(model, LM) else None
    if isinstance(SMALL_MODELS[name], LMConfig) or (config is not None and config.initialisation == "zero-output"):
        shake(model, 0.2)
    return model


def shake(module: nn.Module, deviation: float) -> None:
    """Moves every parameter off its first value."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += deviation * torch.randn_like(parameter)


def enlarge(model: nn.Module, factor: float) -> None:
    """All weights: at the start those of a Transformer are so small that what it attends to hardly matters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
