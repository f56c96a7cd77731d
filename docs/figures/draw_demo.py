"""Draws docs/figures/demo.svg from results/demo/: what `make demo` found."""

from pathlib import Path

from logdepth.drawing import save_svg
from logdepth.report.figures import figures
from logdepth.results import read_results

ROOT = Path(__file__).parent.parent.parent


def main() -> None:
    _, figure = figures(read_results(ROOT / "results" / "demo"))["overview"]
    save_svg(figure, ROOT / "docs" / "figures" / "demo.svg", "results/demo")


if __name__ == "__main__":
    main()
