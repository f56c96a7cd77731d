"""How large everything is that is measured: as the tables have it, or tiny, to rehearse on a CPU."""

from dataclasses import dataclass, replace

from logdepth.models import ScanLMConfig, TransformerConfig
from logdepth.operators import GRCConfig
from logdepth.recipes import recipe

BOTH_NETS = "AR-GRC, both nets"
NO_NETS = "AR-GRC, no nets"
SINUSOIDAL = "Transformer, sinusoidal, 16 heads"
SINUSOIDAL_8 = "Transformer, sinusoidal, 8 heads"
ALIBI = "Transformer, ALiBi, 16 heads"
LARGE = "AR-GRC, D = 1,536"
OURS = (BOTH_NETS, NO_NETS)
THEIRS = (SINUSOIDAL, ALIBI, SINUSOIDAL_8)
FLASH = (SINUSOIDAL, SINUSOIDAL_8)


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Rows that each have read some tokens."""

    batch: int
    absorbed: int
    spread: int = 0
    """Rows stand at random places up to this far before or after `absorbed`; 0: all at one place."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    smoke: bool
    """A rehearsal: no torch.compile, and no number means anything."""
    vocab_size: int
    ours: dict[str, ScanLMConfig]
    theirs: dict[str, TransformerConfig]
    large: ScanLMConfig
    large_vocab_size: int
    tokens: int
    """In a forward pass, as near as whole rows come to it."""
    contexts: tuple[int, ...]
    """Tokens a row; the most telling first, should the time run out."""
    long_context: int
    """In one row, for our models alone."""
    training: tuple[tuple[int, int], ...]
    """Rows and tokens a row of training steps."""
    training_between: tuple[tuple[int, int], ...]
    """More of them, of ours and the fastest Transformer alone: where they break even."""
    large_training: tuple[int, int]
    decoding: tuple[Decoding, ...]
    decoding_early: tuple[Decoding, ...]
    """More of it, after little text, of ours and the fastest Transformer alone."""
    products: tuple[tuple[int, int, int], ...]
    """Rows, inputs and outputs of the matrix products whose best rate makes the floor."""
    copied_bytes: int
    prefill_tokens: int
    """Tokens, over all rows, that go through a model at once before it decodes."""
    chunk_steps: int
    """Steps of decoding that are timed together."""
    chunks: int
    """So many of them; half of them where steps are slow."""
    least_repeats: int
    seconds: float
    """So long is each thing timed at least; at most five times as long, even where that makes for few repeats."""


def _ours() -> dict[str, ScanLMConfig]:
    both = recipe("wikitext2-ar-grc").model
    assert isinstance(both, ScanLMConfig)
    return {BOTH_NETS: both, NO_NETS: replace(both, embedding_net=False, post_merge="none", post_merge_dropout=0.0)}


def _theirs() -> dict[str, TransformerConfig]:
    sinusoidal = recipe("wikitext2-transformer-sinusoidal").model
    alibi = recipe("wikitext2-transformer-alibi").model
    assert isinstance(sinusoidal, TransformerConfig)
    assert isinstance(alibi, TransformerConfig)
    return {SINUSOIDAL_8: replace(sinusoidal, num_heads=8), SINUSOIDAL: sinusoidal, ALIBI: alibi}


def full() -> Sizes:
    large = recipe("openwebtext2-ar-grc").model
    assert isinstance(large, ScanLMConfig)
    return Sizes(
        smoke=False,
        vocab_size=8_000,
        ours=_ours(),
        theirs=_theirs(),
        large=large,
        large_vocab_size=50_000,
        tokens=65_536,
        contexts=(2_976, 512, 65_536, 8_192),
        long_context=1_048_576,
        training=((32, 512), (4, 8_192)),
        training_between=((8, 2_048), (4, 4_096), (2, 8_192)),
        large_training=(32, 512),
        decoding=(
            Decoding(batch=1, absorbed=65_536),
            Decoding(batch=256, absorbed=8_192),
            Decoding(batch=256, absorbed=8_192, spread=512),
        ),
        decoding_early=(Decoding(batch=1, absorbed=512), Decoding(batch=256, absorbed=512)),
        products=((8_192, 8_192, 8_192), (32_768, 1_024, 2_048), (32_768, 2_048, 2_048)),
        copied_bytes=2**32,
        prefill_tokens=65_536,
        chunk_steps=128,
        chunks=6,
        least_repeats=20,
        seconds=0.25,
    )


def smoke() -> Sizes:
    def narrow(config: ScanLMConfig) -> ScanLMConfig:
        return replace(config, embed_width=16, operator=GRCConfig(width=16, dropout=0.1))

    ours = {name: narrow(config) for name, config in _ours().items()}
    theirs = {
        name: replace(config, embed_width=64, num_layers=2, attention="sdpa") for name, config in _theirs().items()
    }
    return replace(
        full(),
        smoke=True,
        vocab_size=37,
        ours=ours,
        theirs=theirs,
        large=replace(narrow(full().large), embed_width=8),
        large_vocab_size=97,
        tokens=128,
        contexts=(11, 16, 128),
        long_context=256,
        training=((4, 16), (2, 32)),
        training_between=((3, 24),),
        large_training=(2, 8),
        decoding=(
            Decoding(batch=1, absorbed=40),
            Decoding(batch=4, absorbed=24),
            Decoding(batch=4, absorbed=24, spread=5),
        ),
        decoding_early=(Decoding(batch=4, absorbed=8),),
        products=((32, 32, 32), (64, 16, 32)),
        copied_bytes=2**16,
        prefill_tokens=64,
        chunk_steps=4,
        chunks=3,
        least_repeats=3,
        seconds=0.01,
    )
