"""Studies of tasks: how accurate each model is beyond the lengths of its training, and which block to choose."""

import statistics
from collections.abc import Sequence

from logdepth.report.published import (
    accuracies_at,
    is_encoder,
    is_solved,
    published_table,
    scores_of,
    spread,
    title_of_solver,
)
from logdepth.report.tasks import STATE_TRACKING, model_table, score_table, solvers_in, tasks_in
from logdepth.solving import TaskResult
from logdepth.tasks import Case, task_named
from results_page.figures import figure
from results_page.kept import TASK_STUDIES, Kept
from results_page.markdown import NOTHING, markdown

S5, MQAR, BOTH = ("s5", Case(512)), ("mqar", Case(512, 128)), ("mqar", Case(256, 64))
"""The test cases by which blocks are chosen."""


def tasks(kept: Kept) -> str:
    parts = [
        part
        for name, results in kept.tasks.items()
        for part in (
            f"### {TASK_STUDIES[name]}",
            markdown(score_table(results)),
            figure(kept, f"tasks-{name}"),
            markdown(model_table(results)),
        )
    ]
    return "\n\n".join(parts) or NOTHING


def task_published(kept: Kept) -> str:
    """Return published results beside ours, also those that were not measured yet."""
    return markdown(published_table(_complete(kept)))


def task_choice(kept: Kept) -> str:
    """Return which block to choose for state tracking, for recall and for both, from the results only."""
    results = _complete(kept)
    tracking, recall = accuracies_at(results, *S5), accuracies_at(results, *MQAR)
    if min(len(tracking), len(recall)) < 2:
        missing = [name for name, found in (("S₅", tracking), ("MQAR", recall)) if len(found) < 2]
        return (
            "The results do not say yet which block to choose: accuracies of several models on "
            f"{' and '.join(missing)} are missing."
        )
    return f"{_for_tracking(results, tracking)}\n\n{_for_recall(results, recall)}"


def _complete(kept: Kept) -> list[TaskResult]:
    """The results of all studies but quick looks."""
    return [one for name, results in kept.tasks.items() if not name.endswith("-quick") for one in results]


def _for_tracking(results: Sequence[TaskResult], found: dict[str, list[float]]) -> str:
    (best, shares), (second, others), *_ = found.items()
    counts = []
    for solver in solvers_in(results):
        run = [
            scores
            for task in tasks_in(results)
            if task_named(task).family in STATE_TRACKING and (scores := scores_of(results, task, solver))
        ]
        if run and not is_encoder(solver):
            counts.append((sum(map(is_solved, run)), len(run), solver))
    solved, of, most = max(counts)
    return (
        f"**To follow a state**, choose {title_of_solver(best)}: {spread(shares)} % of all positions of 512 elements "
        f"of S₅ are right, ahead of {title_of_solver(second)} with {spread(others)} %. Of the language models, "
        f"{title_of_solver(most)} solves most tasks of groups and regular languages, {solved} of {of}."
    )


def _for_recall(results: Sequence[TaskResult], found: dict[str, list[float]]) -> str:
    (best, shares), (second, others), *_ = found.items()
    tracking, recall = accuracies_at(results, *S5), accuracies_at(results, *BOTH)
    common = sorted(tracking.keys() & recall.keys())
    text = (
        f"**To recall**, choose {title_of_solver(best)}: {spread(shares)} % of the 128 queries in 512 tokens of MQAR "
        f"are right, ahead of {title_of_solver(second)} with {spread(others)} %."
    )
    if common:
        both = max(common, key=lambda one: min(statistics.median(scores[one]) for scores in (tracking, recall)))
        text += (
            f" **For both in one model**, {title_of_solver(both)} has {spread(tracking[both])} % on S₅ at 512 elements "
            f"and {spread(recall[both])} % on MQAR with 64 pairs in 256 tokens, trained on each alone."
        )
    return text
