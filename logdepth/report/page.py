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
    template = resources.files("logdepth.report").joinpath("page.html").read_text(encoding="utf-8")
    jinja = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    runs, timings = results
    corpus = runs[0].data.corpus if runs else timings[0].corpus
    return jinja.from_string(template).render(
        corpus=corpus,
        caveat=caveat(runs) if runs else "",
        tables=tables,
        figures=[
            {"name": name, "caption": caption, "svg": as_svg(figure, name, caption)}
            for name, (caption, figure) in figures.items()
            if name != "overview"  # it repeats two of the figures
        ],
        samples=[_sample(row, seeds[0]) for row, seeds in by_row(runs).items()],
        configs=[
            {"title": title_of(row), "json": json.dumps(to_dict(seeds[0].config), indent=2, ensure_ascii=False)}
            for row, seeds in by_row(runs).items()
        ],
        environments=_environments(results),
        commands=sorted({run.made.command for run in runs} | {timing.made for timing in timings}),
        data=to_dict(runs[0].data) if runs else {},
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
