"""The headline table, with one row per model of every study, and the caveats that apply to each study."""

from collections.abc import Iterator, Sequence

from logdepth.report.content import by_row, caveat_of_those_here, missing_models, paper_numbers, three_units, title_of
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
        f"Test split, windows of {TRAINED} tokens (the training length); mean ± standard deviation over seeds. "
        f"*At {LONGEST:,} / at {TRAINED}* is token perplexity in windows of {LONGEST:,} tokens divided by that in "
        f"windows of {TRAINED}: above 1, the model is worse beyond the training length. *Paper* is the paper's token "
        "perplexity, shown where the text and the vocabulary may be the same."
    )
    return table(HEADS, rows, note=note) if rows else NOTHING


def headline_rows(studies: dict[str, Results]) -> Iterator[tuple[Cell, ...]]:
    """Yield the cells below `HEADS`; only the first row of a study has its name."""
    for name, results in studies.items():
        paper, label = paper_numbers(results.runs) if results.runs else {}, label_of(name)
        for row, seeds in by_row(results.runs).items():
            cells = (label, title_of(row), *three_units(seeds), over_trained(seeds))
            yield (*cells, len(seeds), f"{seeds[0].parameters / 1e6:.1f}M", paper.get(row, "–"))
            label = ""


def caveats(kept: Kept) -> str:
    """List each caveat once, with the studies that it applies to and the models that they lack."""
    found: dict[str, dict[str, Results]] = {}
    for name, results in kept.studies.items():
        if results.runs:
            found.setdefault(caveat_of_those_here(results.runs), {})[name] = results
    return "\n".join(_caveat(words, studies) for words, studies in found.items())


def _caveat(words: str, studies: dict[str, Results]) -> str:
    missing = "; ".join(missing_in(studies))
    return f"- *{'; '.join(map(label_of, studies))}.* {words}" + (f" Not run: {missing}." if missing else "")


def missing_in(studies: dict[str, Results]) -> list[str]:
    """Return `A, B and C of STUDY` for each study that has some runs but not all models."""
    lacking = {name: missing_models(results.runs) for name, results in studies.items() if results.runs}
    return [f"{_enumerated(models)} of {label_of(name)}" for name, models in lacking.items() if models]


def _enumerated(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
