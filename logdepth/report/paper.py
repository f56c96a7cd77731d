"""The paper's token perplexities, with its own tokenizers and texts, for comparison in tables."""

PERPLEXITY: dict[str, dict[str, str]] = {
    "ptb": {
        "ar-grc": "14.34",
        "ar-mlp-ldru": "15.94",
        "transformer-alibi": "13.34",
        "transformer-sinusoidal": "12.68",
    },
    "wikitext2_raw": {
        "ar-grc": "90.74",
        "ar-mlp-ldru": "122.81",
        "transformer-alibi": "85.49",
        "transformer-sinusoidal": "94.30",
    },
    "openwebtext2": {
        "ar-grc": "46.08 ± 0.06",
        "transformer-alibi": "34.43 ± 0.03",
        "transformer-sinusoidal": "37.32 ± 0.10",
    },
}
"""Maps a corpus and a row to test perplexity. The paper's WikiText-2 is raw text, not comparable with `.tokens`."""
VOCABULARIES: dict[str, tuple[int, ...]] = {"ptb": (1_000, 1_500)}
"""Possible vocabulary sizes of a corpus where the paper's text and its parameter counts disagree."""
