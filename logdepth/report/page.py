"""Render a study as one self-contained HTML page. It needs no network and no scripts and adapts to any screen size."""

import json
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import TYPE_CHECKING, Any

import jinja2

from logdepth.config import to_dict
from logdepth.drawing import as_svg
from logdepth.report.content import by_row, caveat, title_of
from logdepth.report.table import Table
from logdepth.results import Results, RunResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def page(results: Results, tables: Sequence[Table], figures: "Mapping[str, tuple[str, Figure]]") -> str:
    """Return the page's HTML."""
    runs, timings = results
    corpus = runs[0].data.corpus if runs else timings[0].corpus
    configs = {
        title_of(row): json.dumps(to_dict(seeds[0].config), indent=2, ensure_ascii=False)
        for row, seeds in by_row(runs).items()
    }
    return rendered(
        name=corpus,
        heading=f"Log-depth recurrent language models on {corpus}",
        summary=caveat(runs) if runs else "",
        tables=tables,
        drawn={name: one for name, one in figures.items() if name != "overview"},  # it repeats two of the figures
        samples=[_sample(row, seeds[0]) for row, seeds in by_row(runs).items()],
        configs=configs,
        environments=_environments(results),
        commands=sorted({run.made.command for run in runs} | {timing.made for timing in timings}),
        data=to_dict(runs[0].data) if runs else {},
        runs=runs,
    )


def rendered(
    *,
    name: str,
    heading: str,
    summary: str,
    tables: Sequence[Table],
    drawn: "Mapping[str, tuple[str, Figure]]",
    configs: Mapping[str, str],
    environments: Sequence[Mapping[str, Any]],
    commands: Sequence[str],
    samples: Sequence[Mapping[str, Any]] = (),
    data: Mapping[str, Any] | None = None,
    runs: Sequence[RunResult] = (),
) -> str:
    """Return the HTML of a study's page.

    Args:
        name: name of the study, for the title of the window.
        heading: title of the page.
        summary: what a reader must know before comparing numbers.
        tables: the tables to show.
        drawn: figures by name, each with its caption.
        configs: configs as JSON, by title.
        environments: versions and devices of the runs.
        commands: the commands that made the results.
        samples: generated texts of language models.
        data: facts about the text of a corpus.
        runs: runs to list.
    """
    template = resources.files("logdepth.report").joinpath("page.html").read_text(encoding="utf-8")
    jinja = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    figures = [
        {"name": name, "caption": caption, "svg": as_svg(figure, name, caption)}
        for name, (caption, figure) in drawn.items()
    ]
    return jinja.from_string(template).render(
        name=name,
        heading=heading,
        summary=summary,
        tables=tables,
        figures=figures,
        samples=samples,
        configs=[{"title": title, "json": text} for title, text in configs.items()],
        environments=environments,
        commands=commands,
        data=data or {},
        runs=runs,
    )


def _sample(row: str, run: RunResult) -> dict[str, Any]:
    return {"title": title_of(row), "seed": run.config.seed, "samples": run.samples}


def _environments(results: Results) -> list[dict[str, Any]]:
    """Return the distinct environments."""
    found: list[dict[str, Any]] = []
    for one in [run.environment for run in results.runs] + [timing.environment for timing in results.timings]:
        if one not in found:
            found.append(one)
    return found
