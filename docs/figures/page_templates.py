"""Generated pages of docs/: NAME.in.md and NAME/*.in.md are templates, whose `{{placeholders}}` are filled in."""

import re
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parents[1]
TEMPLATE = ".in.md"
PLACEHOLDER = re.compile(r"\{\{([\w:-]+)\}\}")


def templates(name: str) -> dict[str, Path]:
    """Map each page, as a path below docs/, to its template: page NAME first, then the pages in folder NAME."""
    found = [DOCS / f"{name}{TEMPLATE}", *sorted((DOCS / name).glob(f"*{TEMPLATE}"))]
    return {path.relative_to(DOCS).as_posix().removesuffix(TEMPLATE) + ".md": path for path in found}


def filled_pages(name: str, script: str, content: Callable[[str], str]) -> dict[str, str]:
    """Fill in all templates of NAME: `content` returns the Markdown of a placeholder, with links relative to docs/."""
    return {page: _filled(page, path, script, content) for page, path in templates(name).items()}


def _filled(page: str, template: Path, script: str, content: Callable[[str], str]) -> str:
    to_docs = "../" * page.count("/")

    def fill(place: re.Match[str]) -> str:
        return content(place[1]).replace("](figures/", f"]({to_docs}figures/")

    text = PLACEHOLDER.sub(fill, template.read_text(encoding="utf-8"))
    generated = f"<!-- made by docs/figures/{script} from {template.name} and results/: edit those -->\n"
    return generated + re.sub(r"\n{3,}", "\n\n", text).rstrip() + "\n"
