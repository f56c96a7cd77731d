"""The results in short: a row a model of every study, and what to know before comparing them."""

from collections.abc import Iterator

from logdepth.report.content import by_row, caveat, paper_numbers, three_units, title_of
from logdepth.report.table import Cell
from logdepth.results import Results
from results_page.kept import Kept, label_of
from results_page.lengths import LONGEST, TRAINED, over_trained
from results_page.markdown import NOTHING, table

HEADS = (
    "study",
    "model",
    "token perplexity",
    "word perplexity",
    "bits per byte",
    f"at {LONGEST:,} / at {TRAINED}",
    "seeds",
    "parameters",
    "paper",
)


def headline(kept: Kept) -> str:
    rows = list(headline_rows(kept.studies))
    note = (
        f"At {TRAINED} tokens, the length of training; means over seeds ± standard deviation. The paper's numbers are "
        "perplexities a token, and stand here where text and vocabulary may be the same."
    )
    return table(HEADS, rows, note=note) if rows else NOTHING


def headline_rows(studies: dict[str, Results]) -> Iterator[tuple[Cell, ...]]:
    """Below `HEADS`; the study's name stands at its first model."""
    for name, results in studies.items():
        paper, label = paper_numbers(results.runs) if results.runs else {}, label_of(name)
        for row, seeds in by_row(results.runs).items():
            cells = (label, title_of(row), *three_units(seeds), over_trained(seeds))
            yield (*cells, len(seeds), f"{seeds[0].parameters / 1e6:.1f}M", paper.get(row, "–"))
            label = ""


def caveats(kept: Kept) -> str:
    """Each once, with the studies that it is for."""
    found: dict[str, list[str]] = {}
    for name, results in kept.studies.items():
        if results.runs:
            found.setdefault(caveat(results.runs), []).append(label_of(name))
    return "\n".join(f"- *{'; '.join(names)}.* {words}" for words, names in found.items())
