"""Draws docs/figures/speed-*.svg and writes docs/performance.md and the pages in docs/performance/, from results/.

The text is in docs/performance.in.md and docs/performance/*.in.md. The numbers are those of the latest
results/speed-*.json, and of results/accelerated-*.json.
"""

import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs uninstalled too, and finds the benchmarks

from benchmarks import program
from logdepth.atomic import write_text
from logdepth.drawing import house_style
from page_templates import DOCS, filled_pages
from speed_page.acceleration import same_results
from speed_page.figures import FIGURES, drawn
from speed_page.headline import headline
from speed_page.machine import code_hashes, machine
from speed_page.measured import Report, latest_report
from speed_page.sections import decoding, forward, large, rates, startup, training, training_floor
from speed_page.verdicts import summary, verdicts

SECTIONS: dict[str, Callable[[Report], str]] = {
    "headline": headline,
    "code_hashes": code_hashes,
    "machine": machine,
    "summary": summary,
    "verdicts": verdicts,
    "forward": forward,
    "training": training,
    "training_floor": training_floor,
    "large": large,
    "decoding": decoding,
    "startup": startup,
    "rates": rates,
    "same_results": lambda _: same_results(),
}
"""The content of each `{{name}}`; `{{NAME_figure}}` is figure NAME."""


def main() -> None:
    report = latest_report()
    texts = pages(report)
    for name, figure in drawn(report).items():
        with house_style():
            figure.savefig(Path(__file__).with_name(f"speed-{name}.svg"), metadata={"Date": None})
    for path, text in texts.items():
        write_text(DOCS / path, text)


def pages(report: Report) -> dict[str, str]:
    """Map each page, as a path below docs/, to its text."""

    def content(placeholder: str) -> str:
        if placeholder.endswith("_figure"):
            figure = placeholder.removesuffix("_figure")
            return f"![{FIGURES[figure]}](figures/speed-{figure}.svg)\n\n*{FIGURES[figure]}*"
        return SECTIONS[placeholder](report)

    return filled_pages("performance", "draw_speed.py", content)


if __name__ == "__main__":
    program.run(main)
