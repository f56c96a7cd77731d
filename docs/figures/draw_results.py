"""Writes docs/results.md, the pages in docs/results/, their figures and the README's table, all from results/.

The text is in docs/results.in.md and docs/results/*.in.md. Studies that have not been run are marked as such.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # runs uninstalled too

from benchmarks import program
from logdepth.atomic import write_text
from logdepth.drawing import save_svg
from logdepth.errors import UserError
from results_page.figures import Plan, figure_file, page_plans
from results_page.kept import Kept, read_kept
from results_page.page import pages
from results_page.readme import readme_block, readme_plans, with_block

ROOT = Path(__file__).parents[2]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = program.Parser(__doc__)
    parser.add_argument(
        "--results", type=Path, default=ROOT / "results", help="folder of the result files (default: results/)"
    )
    parser.add_argument(
        "--docs", type=Path, default=ROOT / "docs", help="folder to write the pages and figures/ to (default: docs/)"
    )
    parser.add_argument(
        "--readme", type=Path, default=ROOT / "README.md", help="README whose table is updated (default: README.md)"
    )
    given = parser.parse_args(arguments)
    try:
        write(given.results, given.docs, given.readme)
    except OSError as error:
        raise UserError(str(error)) from None


def write(results: Path, docs: Path, readme: Path) -> None:
    """Write all files. Texts are made first, so that a broken result file leaves everything as it was."""
    kept = read_kept(results)
    texts = {
        **{docs / path: text for path, text in pages(kept).items()},
        readme: with_block(readme.read_text(encoding="utf-8"), readme_block(kept)),
    }
    figures = {docs / "figures" / figure_file(name): plan for name, plan in plans(kept).items()}
    for path, plan in figures.items():
        save_svg(plan.draw(), path, plan.source)
    for path in (docs / "figures").glob(figure_file("*")):
        if path not in figures:
            path.unlink()
    for path, text in texts.items():
        write_text(path, text)


def plans(kept: Kept) -> dict[str, Plan]:
    """Map names to all figures."""
    return page_plans(kept) | readme_plans(kept)


if __name__ == "__main__":
    program.run(main)
