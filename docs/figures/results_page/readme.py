"""The results in the README: the headline table and one figure, for a few studies."""

from functools import partial
from typing import TYPE_CHECKING

from logdepth.errors import UserError
from logdepth.report.figures import draw_contexts, side_by_side
from logdepth.results import Results
from results_page.figures import Plan, figure_file, shown
from results_page.headline import HEADS, headline_rows, missing_in
from results_page.kept import STUDIES, Kept, label_of
from results_page.lengths import LONGEST, TRAINED
from results_page.markdown import NOTHING, table

if TYPE_CHECKING:
    from results_page.figures import Panels

IN_README = ("wikitext2", "wikitext2-tuned")
EXPLAINED = (
    f"Table: test split, windows of {TRAINED} tokens (the training length), mean ± standard deviation over seeds. "
    f"At {LONGEST:,} / at {TRAINED}: token perplexity in windows of {LONGEST:,} tokens divided by that in windows of "
    f"{TRAINED} (above 1: worse beyond the training length)."
)
BEGIN, END = "<!-- results -->\n", "<!-- /results -->"


def readme_block(kept: Kept) -> str:
    """Return the text between `BEGIN` and `END`; the paper's numbers, the last column, are only in docs/results.md."""
    rows = [row[:-1] for row in headline_rows(_studies(kept))]
    if not rows:
        return NOTHING + "\n"
    plans = readme_plans(kept)
    figures = [f"![{plan.caption}](docs/figures/{figure_file(name)})" for name, plan in plans.items()]
    captions = ". ".join(f"Figure: {plan.caption[0].lower()}{plan.caption[1:]}" for plan in plans.values())
    missing = [STUDIES[name] for name in IN_README if name not in kept.studies] + missing_in(_studies(kept))
    words = [f"Not run yet: {'; '.join(missing)}."] if missing else []
    return "\n\n".join([table(HEADS[:-1], rows), *words, *figures, f"*{EXPLAINED} {captions}.*"]) + "\n"


def with_block(readme: str, block: str) -> str:
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"the README has no place for the table: it must contain {BEGIN.strip()} and {END}")
    return before + begin + block + end + after


def readme_plans(kept: Kept) -> dict[str, Plan]:
    """Map names to the figures of the README: perplexity only, as the benchmark's figure of time has faster
    Transformers than the studies."""
    measured = {name: runs for name, (runs, _) in _studies(kept).items() if runs}
    if not measured:
        return {}
    caption = "Test perplexity against context length. Dashed line: training length"
    source = "; ".join(kept.sources[name] for name in measured)
    panels: Panels = {label_of(name): partial(draw_contexts, runs=runs) for name, runs in measured.items()}
    return {"perplexity": Plan(caption, source, partial(side_by_side, panels))}


def main_figures(kept: Kept) -> str:
    """Return the README's figures for a page, with links relative to docs/."""
    return "\n\n".join(shown(name, plan) for name, plan in readme_plans(kept).items()) or NOTHING


def _studies(kept: Kept) -> dict[str, Results]:
    return {name: kept.studies[name] for name in IN_README if name in kept.studies}
