"""Tables, figures and the page of a study of tasks, from its result files."""

import json
import math
import statistics
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from logdepth.blocks import ScanConfig
from logdepth.drawing import COLOURS, FAINT, house_style
from logdepth.errors import UserError
from logdepth.models import LMConfig
from logdepth.report.figures import colour_of, legend_below, marker_of
from logdepth.report.page import rendered
from logdepth.report.published import (
    ENOUGH_SEEDS,
    common_cases,
    is_solved,
    published_table,
    scores_of,
    spread,
    title_of_solver,
)
from logdepth.report.table import Cell, Table
from logdepth.report.write import Report, write_parts
from logdepth.solving import (
    DIVERGED,
    FEW_CLASSES,
    SOLVED,
    SOLVERS,
    TaskResult,
    beyond,
    chance_of,
    percent,
    read_task_results,
)
from logdepth.tasks import TASKS, Case, task_named

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLUMNS = 3
"""Panels of a figure beside each other."""
MANY_CONFIGS = 16
"""Number of configs up to which a page shows all."""
SMALL: dict[str, Any] = {"ha": "right", "va": "bottom", "fontsize": 8, "color": FAINT}
"""The words inside a panel."""
INCHES_PER_NAME = 2.7
"""Width of a model's name in a legend."""
LETTERS_PER_INCH = 15
"""In the line above a figure."""
CAPTION = (
    "Accuracy by length. Shaded: lengths of training. Thick lines: median over seeds; thin lines: single seeds. "
    "Dotted: chance, the best guess that does not read the input."
)
STATE_TRACKING = ("groups", "regular-languages")
"""Families in which a state has to be followed."""
FOLLOWS = "its state takes up one token after another, at any length"
"""Why a scan is ahead in state tracking."""
WEIGHTING = f"with equal weight for each class if there are at most {FEW_CLASSES}"
METHOD = (
    f"Score: share of right answers at all asked positions, {WEIGHTING}, averaged over the test cases that are longer, "
    "or have more items, than all of training. Cells: median over seeds, and the lowest and highest seed in brackets. "
    f"●: solved, a median of at least {SOLVED:.1%} over at least {ENOUGH_SEEDS} seeds; ○: the same with fewer seeds. "
    "Every seed counts, whether it learned the task, did not, or diverged. An encoder answers once, at the end of a "
    "sequence."
)


def write_task_report(folder: Path) -> Report:
    """Write a study's tables/ from its results/; if matplotlib is installed, also figures/ and report.html."""
    results = read_task_results(folder / "results")
    if not results:
        raise UserError(f"{folder / 'results'} contains no result files; create some with `logdepth reproduce`")
    published = published_table(results, tasks_in(results))
    made = [score_table(results), model_table(results), *([published] if published.rows else [])]
    every = [*made, _accuracies(results)]
    return write_parts(folder, every, lambda: figures(results), lambda drawn: task_page(results, made, drawn))


def task_page(results: Sequence[TaskResult], tables: Sequence[Table], drawn: "Mapping[str, tuple[str, Figure]]") -> str:
    """The HTML page of a study of tasks."""
    environments = [result.environment for result in results]
    return rendered(
        name=_families(results),
        heading=f"What models compute: {_families(results)}",
        summary=headline(results),
        tables=tables,
        drawn=drawn,
        configs=_configs(results),
        environments=[one for number, one in enumerate(environments) if one not in environments[:number]],
        commands=sorted({result.command for result in results}),
    )


def _configs(results: Sequence[TaskResult]) -> dict[str, str]:
    """One config of each model on each task, or where these are many, on the first of its tasks."""
    pairs = [(task, solver) for task in tasks_in(results) for solver in solvers_in(results)]
    found = {pair: runs[0] for pair in pairs if (runs := _of(results, *pair))}
    if len(found) > MANY_CONFIGS:
        first = {pair[1]: pair for pair in reversed(found)}
        found = {pair: found[pair] for pair in reversed(first.values())}
    return {
        f"{title_of_solver(solver)}, on {task_named(task).title}": json.dumps(one.config, indent=2, ensure_ascii=False)
        for (task, solver), one in found.items()
    }


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
    notes = [METHOD]
    for task in tasks_in(results):
        rows.append((task_named(task).title, *(_score(scores_of(results, task, solver)) for solver in solvers)))
        common = common_cases(results, task)
        if any(result.cases > common for result in results if result.task == task):
            notes.append(f"{task_named(task).title}: only the {len(common)} test cases that all runs have count.")
    solved = [sum(is_solved(scores_of(results, task, solver)) for task in tasks_in(results)) for solver in solvers]
    rows.append((f"solved, of {len(rows)}", *map(str, solved)))
    seeds = sorted({result.seed for result in results})
    return Table(
        name="scores",
        title="Accuracy beyond the training lengths, in %",
        note=f"{' '.join(notes)} Seeds: {', '.join(map(str, seeds))}. –: not run.",
        heads=("task", *map(title_of_solver, solvers)),
        rows=tuple(rows),
    )


def _score(scores: Sequence[float]) -> str | None:
    if not scores:
        return None
    dot = " ●" if is_solved(scores) else " ○" if statistics.median(scores) >= SOLVED else ""
    middle, *rest = spread(scores).split(" ", 1)
    return " ".join([middle + dot, *rest])


def model_table(results: Sequence[TaskResult]) -> Table:
    """How large the models are, and how they were trained."""
    rows: list[tuple[Cell, ...]] = []
    for solver in solvers_in(results):
        runs = [result for result in results if result.solver == solver]
        train = [result.config.get("train", {}) for result in runs]
        rows.append(
            (
                title_of_solver(solver),
                _range([run.parameters for run in runs]),
                ", ".join(dict.fromkeys(str(one.get("optimizer", "–")) for one in train)),
                ", ".join(
                    dict.fromkeys(f"{one.get('learning_rate', '–')} {one.get('schedule', '')}".strip() for one in train)
                ),
                _range([run.steps for run in runs]),
                *(f"{sum(run.finished == why for run in runs)} of {len(runs)}" for why in ("solved", DIVERGED)),
            )
        )
    return Table(
        name="models",
        title="Models and their training",
        note="Ranges are over tasks, whose alphabets differ, and seeds. All models of a task have the same batches, "
        "curriculum and settings, except that encoders have those of their paper; no rate was tuned for a model. "
        "Solved early: training stopped because two checks in a row found the task solved.",
        heads=("model", "parameters", "optimizer", "learning rate", "steps", "solved early", "diverged"),
        rows=tuple(rows),
    )


def _range(numbers: Sequence[int]) -> str:
    least, most = min(numbers), max(numbers)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"


def headline(results: Sequence[TaskResult]) -> str:
    """Who is ahead beyond the training lengths, why, and how small the models are."""
    tasks, solvers = tasks_in(results), solvers_in(results)
    leaders = set()
    for task in tasks:
        medians = {one: statistics.median(found) for one in solvers if (found := scores_of(results, task, one))}
        best = max(medians.values())
        leaders.add(tuple(one for one, median in medians.items() if median == best))
    text = ""
    if len(solvers) > 1 and len(leaders) == 1 and len(ahead := next(iter(leaders))) == 1:
        text = f"{title_of_solver(ahead[0])} is ahead beyond the training lengths"
        if _scans(ahead[0]) and all(task_named(task).family in STATE_TRACKING for task in tasks):
            text += f": {FOLLOWS}"
        text += ". "
    largest, seeds = max(result.parameters for result in results), len({result.seed for result in results})
    size = f"at most {math.ceil(largest / 1e4) / 100:g}M parameters"
    return f"{text}Tiny models, of {size}; {seeds} seed{'s' if seeds > 1 else ''} each."


def _scans(solver: str) -> bool:
    """Whether a model has a scan of states."""
    config = SOLVERS[solver].config(64) if solver in SOLVERS else None
    return isinstance(config, LMConfig) and any(isinstance(block, ScanConfig) for block in config.blocks)


def _accuracies(results: Sequence[TaskResult]) -> Table:
    rows: list[tuple[Cell, ...]] = []
    for task in tasks_in(results):
        for solver in solvers_in(results):
            for result in sorted(_of(results, task, solver), key=lambda one: one.seed):
                for one in result.test:
                    shares = (percent(share, 4) for share in (one.accuracy, one.last_accuracy))
                    counts = (one.sequences, one.asked, one.right)
                    rows.append((task, solver, result.seed, one.length, one.items, *counts, *shares))
    return Table(
        name="accuracies",
        title="Accuracy in every test case, in %",
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
    width = max(4.8, 3.6 * columns + 0.6)
    names = max(1, int(width / INCHES_PER_NAME))
    solvers = solvers_in(results)
    height = 2.9 * rows + 0.6 + 0.22 * -(-len(solvers) // names)
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.suptitle(textwrap.fill(headline(results), int(LETTERS_PER_INCH * width)), x=0.01, ha="left", fontsize=9)
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, task in zip(panels, tasks, strict=False):
        draw_accuracy(axes, task, [result for result in results if result.task == task], solvers)
    for axes in panels[len(tasks) :]:
        axes.set_visible(False)
    legend_below(figure, columns=names)
    return {"accuracy": (CAPTION, figure)}


def draw_accuracy(axes: "Axes", task: str, results: Sequence[TaskResult], solvers: Sequence[str]) -> None:
    """Draw the accuracy of all models on one task, by test case."""
    cases = sorted({one.case for result in results for one in result.test})
    is_named = any(case.items for case in cases)
    place: Callable[[Case], float] = (lambda case: cases.index(case)) if is_named else (lambda case: case.length)
    for number, solver in enumerate(solvers):
        style = line_of(number)
        seeds = [result for result in results if result.solver == solver]
        if not seeds:
            continue
        lines = [{one.case: 100 * one.accuracy for one in result.test} for result in seeds]
        if len(lines) > 1:
            for line in lines:
                places = [place(case) for case in cases if case in line]
                here = [line[case] for case in cases if case in line]
                axes.plot(places, here, **style | {"marker": ""}, linewidth=0.6, alpha=0.5)
        common = [case for case in cases if all(case in line for line in lines)]
        medians = [statistics.median(line[case] for line in lines) for case in common]
        axes.plot(
            [place(case) for case in common],
            medians,
            **style,
            markevery=0.1 if len(common) > 16 else 1,  # as a share of the panel's diagonal
            label=title_of_solver(solver),
        )
    chance = 100 * chance_of(task_named(task))
    axes.axhline(chance, color=FAINT, linewidth=1, linestyle=":")
    axes.annotate(
        "chance", (1, chance), (0, 2), xycoords=("axes fraction", "data"), textcoords="offset points", **SMALL
    )
    axes.set_ylim(-3, 103)
    axes.set_title(task_named(task).title)
    axes.set_ylabel("right answers, %")
    if is_named:
        axes.set_xticks(range(len(cases)), [str(case) for case in cases], rotation=45, ha="right", fontsize=8)
        axes.set_xlabel("length/items")
    else:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1024:.0f}k" if value >= 4096 else f"{value:,.0f}")
        axes.set_xlabel("length, tokens")
    _mark_training(axes, task, cases, place, is_named)


def line_of(number: int) -> dict[str, Any]:
    """The line of a model by its place among those of a figure. The first 24 are all different."""
    turn = number // len(COLOURS)
    dashes = ("-", (0, (4, 2)), (0, (1, 1.5)))[turn % 3]
    return {"color": colour_of(number), "marker": marker_of(number + turn), "linestyle": dashes}


def _mark_training(
    axes: "Axes", task: str, cases: Sequence[Case], place: Callable[[Case], float], is_named: bool
) -> None:
    """Shade what training has seen."""
    further = set(beyond(task_named(task), cases))
    seen = [place(case) for case in cases if case not in further]
    if not seen:
        return
    last = max(seen) + 0.5 if is_named else float(max(case.length for case in task_named(task).train_cases))
    first = min(seen) - 0.5 if is_named else 0.85 * min(seen)
    axes.axvspan(first, last, color=FAINT, alpha=0.12, linewidth=0)
    axes.set_xlim(left=first)
    axes.annotate("training", (first, 0), (3, 2), xycoords="data", textcoords="offset points", **SMALL | {"ha": "left"})
