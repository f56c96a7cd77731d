"""The figures of the pages: caption and data source of each, known before any of them is drawn."""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from logdepth.associativity import drawn as associativity_drawn
from logdepth.report.content import by_row, device_of, title_of
from logdepth.report.figures import (
    colour_of,
    draw_context_lines,
    draw_contexts,
    draw_positions,
    draw_times,
    draw_training,
    marker_of,
    numbered,
    side_by_side,
    texts_with_positions,
)
from logdepth.report.tasks import CAPTION as TASK_CAPTION
from logdepth.report.tasks import figures as task_figures
from logdepth.results import TimingResult, slug
from logdepth.solving import TaskResult
from results_page.kept import STUDIES, Kept, Sweep, home_of, label_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Panels = dict[str, Callable[[Axes], None]]


SCAN, RIVAL = "ar-grc", "transformer-alibi"
"""The model whose depth is varied, and the Transformer that it is compared with."""


class Plan(NamedTuple):
    """A figure to draw."""

    caption: str
    source: str
    """The result files with their hash: shows whether a figure is up to date without drawing it again."""
    draw: "Callable[[], Figure]"


def figure_file(name: str) -> str:
    return f"results-{name}.svg"


def figure(kept: Kept, name: str) -> str:
    """Return a figure as Markdown, with a link relative to docs/; empty if there is no such figure."""
    plan = page_plans(kept).get(name)
    return shown(name, plan) if plan else ""


def shown(name: str, plan: Plan) -> str:
    return f"![{plan.caption}](figures/{figure_file(name)})\n\n*{plan.caption}*"


def page_plans(kept: Kept) -> dict[str, Plan]:
    """Map names to the figures of the pages."""
    of_studies = [pair for name in kept.studies for pair in _study_plans(kept, name)]
    of_tasks = _task_plans(kept)
    return dict([*of_studies, *_depth_plans(kept), *_sweep_plans(kept), *_associativity_plans(kept), *of_tasks])


def _task_plans(kept: Kept) -> Iterator[tuple[str, Plan]]:
    for name, results in kept.tasks.items():
        source = kept.sources[f"tasks/{name}"]
        yield f"tasks-{name}", Plan(TASK_CAPTION, source, partial(_drawn_tasks, results))


def _drawn_tasks(results: Sequence[TaskResult]) -> "Figure":
    return task_figures(results)["accuracy"][1]


def _study_plans(kept: Kept, name: str) -> Iterator[tuple[str, Plan]]:
    (runs, timings), source, label = kept.studies[name], kept.sources[name], label_of(name)
    if runs:
        bands = " Bands: one standard deviation over seeds." if len({run.config.seed for run in runs}) > 1 else ""
        lengths: Panels = {
            "Perplexity by context length": partial(draw_contexts, runs=runs),
            "Loss by position in the window": partial(draw_positions, runs=runs),
        }
        if texts := texts_with_positions(runs):
            panels: Panels = {
                f"Loss by position, {text}": partial(draw_positions, runs=runs, text=text) for text in texts
            }
            caption = f"{label}: loss by position in long windows of other text. Dashed line: training length.{bands}"
            yield f"{name}-others", Plan(caption, source, partial(side_by_side, panels))
        training: Panels = {"Validation loss during training": partial(draw_training, runs=runs)}
        caption = (
            f"{label}: test perplexity by context length, and test loss by position in windows of "
            f"{runs[0].positions.context:,} tokens. Dashed line: training length.{bands}"
        )
        yield f"{name}-lengths", Plan(caption, source, partial(side_by_side, lengths))
        caption = f"{label}: validation loss during training, one line per seed."
        yield f"{name}-training", Plan(caption, source, partial(side_by_side, training))
    if timings:
        caption = f"{label}: time per token by context length. All batches have about the same size. Bands: quartiles."
        yield f"{name}-times", Plan(caption, source, partial(side_by_side, time_panels(timings)))


def depths_figure(study: str) -> str:
    return f"{study}-depths"


def _depth_plans(kept: Kept) -> Iterator[tuple[str, Plan]]:
    """Plan figures of deeper scan models, compared with one layer and with the Transformer with ALiBi."""
    for deep in STUDIES:
        study, names = deep.removesuffix("-deep"), [name for name in kept.studies if home_of(name) == deep]
        if study == deep or study not in kept.studies or not names:
            continue
        shallow = by_row(kept.studies[study].runs)
        lines = [
            (number, "AR-GRC, one layer" if row == SCAN else title_of(row), seeds)
            for number, (row, seeds) in numbered(shallow, kept.studies[study].runs[0].data.corpus)
            if row in (SCAN, RIVAL)
        ]
        for number, name in enumerate(names, len(shallow)):
            lines.append((number, f"AR-GRC, {label_of(name).rpartition(', ')[2]}", kept.studies[name].runs))
        caption = (
            f"{STUDIES[deep]}: test perplexity by context length. Dashed line: training length. Bands: one standard "
            "deviation over seeds."
        )
        panels: Panels = {"Perplexity by context length": partial(draw_context_lines, lines=lines)}
        source = " ".join(kept.sources[name] for name in (study, *names))
        yield depths_figure(deep), Plan(caption, source, partial(side_by_side, panels))


def time_panels(timings: Sequence[TimingResult]) -> "Panels":
    """Map titles to panels; titles are numbered from the second on, as two devices may have the same name."""
    return {
        f"Forward pass, {device_of(one)}" + (f" ({number})" if number else ""): partial(draw_times, result=one)
        for number, one in enumerate(timings)
    }


def sweeps_figure(study: str) -> str:
    return f"sweeps-{slug(study)}"


def _sweep_plans(kept: Kept) -> Iterator[tuple[str, Plan]]:
    for study, sweeps in kept.sweeps.items():
        caption = (
            f"{label_of(study)}: lowest validation loss against number of trials. Markers: single trials. "
            "Hollow markers: pruned trials, with their loss when pruned."
        )
        panels: Panels = {f"Sweeps: {label_of(study)}": partial(_draw_sweeps, sweeps=sweeps)}
        yield sweeps_figure(study), Plan(caption, kept.sources[f"sweeps/{study}"], partial(side_by_side, panels))


def _draw_sweeps(axes: "Axes", sweeps: Mapping[str, Sweep]) -> None:
    from matplotlib.ticker import MaxNLocator

    (corpus,) = {sweep["config"]["data"]["corpus"] for sweep in sweeps.values()}
    for number, (row, sweep) in numbered(sweeps, corpus):
        trials = [(place, one) for place, one in enumerate(sweep["trials"], 1) if one["loss"] is not None]
        lowest = itertools.accumulate(
            (one["loss"] if one["state"] == "complete" else math.inf for _, one in trials), min
        )
        look: Any = {"color": colour_of(number), "linestyle": "none", "marker": marker_of(number), "markersize": 5}
        for place, one in trials:
            axes.plot(place, one["loss"], fillstyle="full" if one["state"] == "complete" else "none", alpha=0.6, **look)
        places = [place for place, _ in trials]
        axes.step(places, list(lowest), where="post", color=colour_of(number), label=title_of(row))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("number of trials")
    axes.set_ylabel("validation loss (nats per token)")


def associativity_figure(name: str) -> str:
    return f"associativity-{slug(name)}"


def _associativity_plans(kept: Kept) -> Iterator[tuple[str, Plan]]:
    for name, found in kept.associativity.items():
        caption = f"{name}: distance by block size, and perplexity with other trees."
        source = kept.sources[f"associativity/{name}"]
        yield associativity_figure(name), Plan(caption, source, partial(associativity_drawn, found))
