"""The table and the figure of results in the README: the headline of a few studies."""

from functools import partial
from typing import TYPE_CHECKING

from logdepth.errors import UserError
from logdepth.report.figures import draw_contexts, side_by_side
from logdepth.results import Results
from results_page.figures import Plan, figure_file
from results_page.headline import HEADS, headline_rows, missing_in
from results_page.kept import STUDIES, Kept, label_of
from results_page.lengths import LONGEST, TRAINED
from results_page.markdown import NOTHING, table

if TYPE_CHECKING:
    from results_page.figures import Panels

IN_README = ("wikitext2", "wikitext2-tuned")
EXPLAINED = (
    f"Table: test split, windows of {TRAINED} tokens, the length of training, means over seeds ± standard deviation; "
    f"at {LONGEST:,} / at {TRAINED}: perplexity in windows so long over that (above 1: worse than at the length of "
    "training)."
)
BEGIN, END = "<!-- results -->\n", "<!-- /results -->"


def readme_block(kept: Kept) -> str:
    """What stands between `BEGIN` and `END`; the last column, the paper's numbers, is left to the page."""
    rows = [row[:-1] for row in headline_rows(_studies(kept))]
    if not rows:
        return NOTHING + "\n"
    plans = readme_plans(kept)
    figures = [f"![{plan.caption}](docs/figures/{figure_file(name)})" for name, plan in plans.items()]
    captions = ". ".join(plan.caption for plan in plans.values())
    missing = [STUDIES[name] for name in IN_README if name not in kept.studies] + missing_in(_studies(kept))
    words = [f"Not run yet: {'; '.join(missing)}."] if missing else []
    return "\n\n".join([table(HEADS[:-1], rows), *words, *figures, f"*{EXPLAINED} {captions}.*"]) + "\n"


def with_block(readme: str, block: str) -> str:
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"the README has no place for the table: it must hold {BEGIN.strip()} and {END}")
    return before + begin + block + end + after


def readme_plans(kept: Kept) -> dict[str, Plan]:
    """Name → the figure of the README: perplexity of all its studies. The one of time is the benchmark's, whose
    Transformers are faster."""
    measured = {name: runs for name, (runs, _) in _studies(kept).items() if runs}
    if not measured:
        return {}
    caption = "Test perplexity against context length; dashed: the length of training"
    source = "; ".join(kept.sources[name] for name in measured)
    panels: Panels = {label_of(name): partial(draw_contexts, runs=runs) for name, runs in measured.items()}
    return {"perplexity": Plan(caption, source, partial(side_by_side, panels))}


def _studies(kept: Kept) -> dict[str, Results]:
    return {name: kept.studies[name] for name in IN_README if name in kept.studies}
