"""Studies of tasks: how accurate each model is beyond the lengths of its training."""

from logdepth.report.tasks import score_table
from results_page.figures import figure
from results_page.kept import TASK_STUDIES, Kept
from results_page.markdown import NOTHING, markdown


def tasks(kept: Kept) -> str:
    parts = [
        part
        for name, results in kept.tasks.items()
        for part in (f"### {TASK_STUDIES[name]}", markdown(score_table(results)), figure(kept, f"tasks-{name}"))
    ]
    return "\n\n".join(parts) or NOTHING
