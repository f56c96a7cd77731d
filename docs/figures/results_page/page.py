"""The pages: docs/results.in.md and the templates in docs/results/, with generated parts in place of placeholders."""

from collections.abc import Callable

from page_templates import filled_pages
from results_page.associativity import associativity
from results_page.bars import bars, verdicts
from results_page.headline import caveats, headline
from results_page.kept import Kept
from results_page.origins import associativity_origins, origins, sweep_origins, task_origins
from results_page.readme import main_figures
from results_page.studies import others, study_section
from results_page.sweeps import sweeps
from results_page.tasks import task_choice, task_published, tasks

SECTIONS: dict[str, Callable[[Kept], str]] = {
    "headline": headline,
    "main_figures": main_figures,
    "verdicts": verdicts,
    "others": others,
    "caveats": caveats,
    "bars": bars,
    "sweeps": sweeps,
    "sweep_origins": sweep_origins,
    "associativity": associativity,
    "associativity_origins": associativity_origins,
    "tasks": tasks,
    "task_choice": task_choice,
    "task_published": task_published,
    "task_origins": task_origins,
}
"""The content of each `{{name}}`; `PER_STUDY` has the others."""
PER_STUDY: dict[str, Callable[[Kept, str], str]] = {"study": study_section, "origins": origins}
"""The content of each `{{name:STUDY}}`."""


def pages(kept: Kept) -> dict[str, str]:
    """Map each page, as a path below docs/, to its text."""

    def content(placeholder: str) -> str:
        name, _, study = placeholder.partition(":")
        return PER_STUDY[name](kept, study) if study else SECTIONS[name](kept)

    return filled_pages("results", "draw_results.py", content)
