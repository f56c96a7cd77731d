"""The tables and figures of each study."""

from logdepth.report.content import tables
from results_page.figures import depths_figure, figure
from results_page.kept import Kept, home_of, label_of
from results_page.lengths import thinned
from results_page.markdown import NOTHING, markdown
from results_page.origins import folder_origin


def study_section(kept: Kept, study: str) -> str:
    """Return the section of a study, with all result folders that belong to it."""
    names = [name for name in kept.studies if home_of(name) == study]
    parts = [figure(kept, depths_figure(study)), *(_one_study(kept, name, titled=names != [study]) for name in names)]
    return "\n\n".join(part for part in parts if part) or NOTHING


def others(kept: Kept) -> str:
    """Return the sections of the result folders that have no page of their own, with their commands."""
    names = [name for name in kept.studies if home_of(name) is None]
    return "\n\n".join(
        f"## {name}\n{_one_study(kept, name, titled=False)}\n\n{folder_origin(kept, name)}" for name in names
    )


def _one_study(kept: Kept, name: str, *, titled: bool) -> str:
    made = {table.name: table for table in tables(kept.studies[name])}
    parts = [
        f"## {label_of(name)}" if titled else "",
        *(markdown(made[key]) for key in ("perplexity", "others", "hyperparameters") if key in made),
        figure(kept, f"{name}-lengths"),
        markdown(thinned(made["contexts"])) if "contexts" in made else "",
        markdown(made["paired"]) if "paired" in made else "",
        figure(kept, f"{name}-others"),
        figure(kept, f"{name}-times"),
        *(markdown(thinned(table)) for key, table in made.items() if key.startswith("times-")),
        figure(kept, f"{name}-training"),
    ]
    return "\n\n".join(part for part in parts if part)
