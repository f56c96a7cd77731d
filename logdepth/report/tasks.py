"""Tables, figures and the page of a study of tasks, from its result files."""

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from logdepth.drawing import FAINT, house_style
from logdepth.errors import UserError
from logdepth.report.figures import colour_of, legend_below, marker_of
from logdepth.report.page import rendered
from logdepth.report.table import Cell, Table
from logdepth.report.write import Report, write_parts
from logdepth.solving import FEW_CLASSES, SOLVED, SOLVERS, TaskResult, beyond, chance_of, percent, read_task_results
from logdepth.tasks import TASKS, Case, task_named

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 3
"""Panels of a figure beside each other."""
CAPTION = (
    "Accuracy by length. Shaded: lengths of training. Thick lines: median over seeds; thin lines: single seeds. "
    "Dotted: the best guess that does not read the input."
)
WEIGHTING = f"with equal weight for each class if there are at most {FEW_CLASSES}"
METHOD = (
    f"Score: share of right answers at all asked positions, {WEIGHTING}, averaged over the test cases that are longer, "
    "or have more items, than all of training. Cells: median over seeds, and the lowest and highest seed in brackets. "
    f"●: solved, a median of at least {SOLVED:.1%}. Every seed counts, whether it learned the task or not."
)


def write_task_report(folder: Path) -> Report:
    """Write a study's tables/ from its results/; if matplotlib is installed, also figures/ and report.html."""
    results = read_task_results(folder / "results")
    if not results:
        raise UserError(f"{folder / 'results'} contains no result files; create some with `logdepth reproduce`")
    made = [score_table(results), _accuracies(results)]
    return write_parts(folder, made, lambda: figures(results), lambda drawn: task_page(results, made[:1], drawn))


def title_of_solver(name: str) -> str:
    """A model's name as tables print it."""
    return SOLVERS[name].title if name in SOLVERS else name


def task_page(results: Sequence[TaskResult], tables: Sequence[Table], drawn: "Mapping[str, tuple[str, Figure]]") -> str:
    """The HTML page of a study of tasks."""
    first = {(result.task, result.solver): result for result in reversed(results)}
    environments = [result.environment for result in results]
    return rendered(
        name=_families(results),
        heading=f"What models compute: {_families(results)}",
        summary=METHOD,
        tables=tables,
        drawn=drawn,
        configs={
            f"{task}, {title_of_solver(one)}": json.dumps(first[task, one].config, indent=2) for task, one in first
        },
        environments=[one for number, one in enumerate(environments) if one not in environments[:number]],
        commands=sorted({result.command for result in results}),
    )


def _families(results: Sequence[TaskResult]) -> str:
    return ", ".join(dict.fromkeys(task_named(task).family.replace("-", " ") for task in tasks_in(results)))


def tasks_in(results: Sequence[TaskResult]) -> list[str]:
    """The tasks of results, in the order of TASKS."""
    here = {result.task for result in results}
    return [task for task in TASKS if task in here]


def solvers_in(results: Sequence[TaskResult]) -> list[str]:
    """The models of results, in the order of SOLVERS; others come last."""
    here = {result.solver for result in results}
    return [one for one in SOLVERS if one in here] + sorted(here - SOLVERS.keys())


def _of(results: Sequence[TaskResult], task: str, solver: str) -> list[TaskResult]:
    return [result for result in results if (result.task, result.solver) == (task, solver)]


def score_table(results: Sequence[TaskResult]) -> Table:
    """The scores of all models on all tasks."""
    solvers = solvers_in(results)
    rows: list[tuple[Cell, ...]] = []
    solved = [0] * len(solvers)
    notes = [METHOD]
    for task in tasks_in(results):
        here = [result for result in results if result.task == task]
        common = set.intersection(*(result.cases for result in here))  # other scores could not be compared
        if any(result.cases > common for result in here):
            notes.append(f"{task_named(task).title}: only the {len(common)} test cases that all runs have count.")
        scores = [[one.score_over(common) for one in _of(here, task, solver)] for solver in solvers]
        rows.append((task_named(task).title, *map(_spread, scores)))
        solved = [before + _is_solved(seeds) for before, seeds in zip(solved, scores, strict=True)]
    rows.append((f"solved, of {len(rows)}", *(f"{one}" for one in solved)))
    seeds = sorted({result.seed for result in results})
    return Table(
        name="scores",
        title="Accuracy beyond the training lengths, in %",
        note=f"{' '.join(notes)} Seeds: {', '.join(map(str, seeds))}. –: not run.",
        heads=("task", *map(title_of_solver, solvers)),
        rows=tuple(rows),
    )


def _is_solved(scores: Sequence[float]) -> bool:
    return bool(scores) and statistics.median(scores) >= SOLVED


def _spread(scores: Sequence[float]) -> str | None:
    if not scores:
        return None
    middle = statistics.median(scores)
    text = percent(middle) + (" ●" if middle >= SOLVED else "")
    return f"{text} [{percent(min(scores))}, {percent(max(scores))}]" if len(scores) > 1 else text


def _accuracies(results: Sequence[TaskResult]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for task in tasks_in(results):
        for solver in solvers_in(results):
            for result in sorted(_of(results, task, solver), key=lambda one: one.seed):
                for one in result.test:
                    counts = (one.sequences, one.asked, one.right, one.accuracy, one.last_accuracy)
                    rows.append((task, solver, result.seed, one.length, one.items, *counts))
    return Table(
        name="accuracies",
        title="Accuracy in every test case",
        note=f"accuracy: share of right answers, {WEIGHTING}; at the end: sequences whose last answer is right.",
        heads=(
            *("task", "model", "seed", "length", "items", "sequences", "answers", "right"),
            *("accuracy", "accuracy at the end"),
        ),
        rows=tuple(rows),
    )


@house_style()
def figures(results: Sequence[TaskResult]) -> "dict[str, tuple[str, Figure]]":
    """Each figure's caption and figure, by name."""
    from matplotlib.figure import Figure

    tasks = tasks_in(results)
    columns = min(COLUMNS, len(tasks))
    rows = -(-len(tasks) // columns)
    figure = Figure(figsize=(3.6 * columns + 0.6, 2.9 * rows + 1.0), layout="constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, task in zip(panels, tasks, strict=False):
        draw_accuracy(axes, task, [result for result in results if result.task == task], solvers_in(results))
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    legend_below(figure, columns=2 * columns)
    return {"accuracy": (CAPTION, figure)}


def draw_accuracy(axes: "Axes", task: str, results: Sequence[TaskResult], solvers: Sequence[str]) -> None:
    """Draw the accuracy of all models on one task, by test case."""
    cases = sorted({one.case for result in results for one in result.test})
    is_named = any(case.items for case in cases)
    place: Callable[[Case], float] = (lambda case: cases.index(case)) if is_named else (lambda case: case.length)
    _mark_training(axes, task, cases, place, is_named)
    for number, solver in enumerate(solvers):
        seeds = [result for result in results if result.solver == solver]
        if not seeds:
            continue
        lines = [{one.case: 100 * one.accuracy for one in result.test} for result in seeds]
        if len(lines) > 1:
            for line in lines:
                places = [place(case) for case in cases if case in line]
                here = [line[case] for case in cases if case in line]
                axes.plot(places, here, color=colour_of(number), marker="", linewidth=0.6, alpha=0.5)
        common = [case for case in cases if all(case in line for line in lines)]
        medians = [statistics.median(line[case] for line in lines) for case in common]
        axes.plot(
            [place(case) for case in common],
            medians,
            color=colour_of(number),
            marker=marker_of(number),
            label=title_of_solver(solver),
        )
    axes.axhline(100 * chance_of(task_named(task)), color=FAINT, linewidth=1, linestyle=":")
    axes.set_ylim(-3, 103)
    axes.set_title(task_named(task).title)
    axes.set_ylabel("right answers, %")
    if is_named:
        axes.set_xticks(range(len(cases)), [str(case) for case in cases], rotation=45, ha="right", fontsize=8)
        axes.set_xlabel("length/items")
    else:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel("length, tokens")


def _mark_training(
    axes: "Axes", task: str, cases: Sequence[Case], place: Callable[[Case], float], is_named: bool
) -> None:
    """Shade what training has seen."""
    further = set(beyond(task_named(task), cases))
    seen = [place(case) for case in cases if case not in further]
    if not seen:
        return
    last = max(seen) + 0.5 if is_named else float(max(case.length for case in task_named(task).train_cases))
    first = min(seen) - 0.5 if is_named else float(min(seen))
    axes.axvspan(first, last, color=FAINT, alpha=0.12, linewidth=0)
