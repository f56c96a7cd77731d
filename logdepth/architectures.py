"""Language models of equal size whose blocks differ: the rows of `logdepth reproduce architectures`, on webmix.

All have a width of 512, RMSNorm, SwiGLU and a tied head. The widths of the MLPs are chosen so that all have as many
parameters outside the embedding as a Transformer of six layers, 18.9 million, to within 0.2 %.
"""

from logdepth.data import DataConfig, TokenizerConfig
from logdepth.models import LMConfig
from logdepth.runs import RunConfig, TrainConfig

CORPUS = "webmix"
WIDTH = 512
ROPE, ALIBI = "attention:qk_norm=true", "attention:positions=alibi,qk_norm=true"
WINDOW = "attention:window=128,qk_norm=true"
"""The same window wherever there is one."""
MEMORY = "memory:levels=5"
"""Training on 2,048 tokens in chunks of 64 reaches five levels."""
DELTA, SCAN = "memory:reading=fold", "scan:heads=4"


def _layers(*mixers: str, hidden: int = 1368, repeats: int) -> LMConfig:
    """Each mixer is followed by an MLP with so many hidden units."""
    mlp = f"mlp:multiple={hidden / WIDTH}"
    return LMConfig(dim=WIDTH, blocks=tuple(block for mixer in mixers for block in (mixer, mlp)), repeats=repeats)


ARCHITECTURES: dict[str, LMConfig] = {
    "memory-window": _layers(MEMORY, WINDOW, hidden=1272, repeats=3),
    "delta-window": _layers(DELTA, WINDOW, hidden=1280, repeats=3),
    "grc-window": _layers(SCAN, WINDOW, hidden=936, repeats=3),
    "memory": _layers(MEMORY, hidden=1184, repeats=6),
    "delta": _layers(DELTA, hidden=1192, repeats=6),
    "grc": _layers(SCAN, hidden=1536, repeats=4),
    "rope": _layers(ROPE, repeats=6),
    "alibi": _layers(ALIBI, repeats=6),
    "window": _layers(WINDOW, repeats=6),
}
"""Maps rows of tables to models. memory: a tree of keyed memories, read by levels. delta: the same, folded, which is
Gated DeltaNet. grc: a pre-norm scan of GRC. rope, alibi: attention to all tokens. window: attention to the last 128."""

TITLES = {
    "memory-window": "Memory tree and window",
    "delta-window": "Delta memory and window",
    "grc-window": "GRC scan and window",
    "memory": "Memory tree",
    "delta": "Delta memory",
    "grc": "GRC scan",
    "rope": "Transformer++ (RoPE)",
    "alibi": "Transformer++ (ALiBi)",
    "window": "Transformer++ (window 128)",
}
"""As tables print them."""


def architecture_run(row: str) -> RunConfig:
    """The run of a row, before tuning: 2,400 steps of 16,384 tokens, the same for all models."""
    return RunConfig(
        data=DataConfig(corpus=CORPUS, tokenizer=TokenizerConfig(vocab_size=16_000, lossless=True)),
        model=ARCHITECTURES[row],
        train=TrainConfig(
            learning_rate=2e-3,
            weight_decay=0.1,
            betas=(0.9, 0.95),
            warmup_steps=200,
            max_steps=2_400,
            epochs=1,
            batch_size=8,
            context=2_048,
            evaluate_every=400,
        ),
    )
