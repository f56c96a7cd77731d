"""Draws docs/figures/speed-*.svg and writes docs/performance.md, all from results/speed-*.json.

What is written by hand of that page is in docs/performance.in.md.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs uninstalled too, and finds the benchmarks

from benchmarks import program
from logdepth.atomic import write_text
from logdepth.drawing import house_style
from speed_page.acceleration import same_results
from speed_page.figures import FIGURES, drawn
from speed_page.in_short import in_short
from speed_page.machine import machine
from speed_page.measured import ROOT, Report, latest_report
from speed_page.sections import decoding, forward, large, rates, startup, training, training_floor
from speed_page.verdicts import summary, verdicts

SECTIONS: dict[str, Callable[[Report], str]] = {
    "in_short": in_short,
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
"""What stands at `{{name}}` in the template."""


def main() -> None:
    report = latest_report()
    text = page(report)
    for name, figure in drawn(report).items():
        with house_style():
            figure.savefig(Path(__file__).with_name(f"speed-{name}.svg"), metadata={"Date": None})
    write_text(ROOT / "docs" / "performance.md", text)


def page(report: Report) -> str:
    template = (ROOT / "docs" / "performance.in.md").read_text(encoding="utf-8")

    def filled(place: re.Match[str]) -> str:
        name = place[1]
        if name.endswith("_figure"):
            figure = name.removesuffix("_figure")
            return f"![{FIGURES[figure]}](figures/speed-{figure}.svg)"
        return SECTIONS[name](report)

    text = re.sub(r"\{\{(\w+)\}\}", filled, template)
    generated = "<!-- made by docs/figures/draw_speed.py from performance.in.md and results/: edit those -->\n"
    return generated + re.sub(r"\n{3,}", "\n\n", text)


if __name__ == "__main__":
    program.run(main)
