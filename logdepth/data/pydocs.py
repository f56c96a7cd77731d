"""The documentation of the running Python's standard library, about 2 MB: a corpus that needs no download.

Each module's docstrings, in order, form one document, and so does each topic of the language reference. Modules that
some distributions omit are excluded, so that the corpus depends only on the version of Python.
"""

import ast
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from logdepth.data.corpus import Corpus, files_as_source
from logdepth.data.passages import Passage, split_by_hash
from logdepth.errors import UserError

EXCLUDED = {"test", "idlelib", "tkinter", "turtle", "turtledemo", "distutils", "lib2to3", "ensurepip", "pydoc_data"}
HELD_OUT = 0.06


class PyDocs(Corpus):
    summary = "docstrings and language topics of the running Python (about 2 MB); 6 % each held out"
    separated = True

    def source(self) -> dict[str, Any] | None:
        return {"python": sys.version} | files_as_source(_modules())

    def passages(self) -> Iterator[Passage]:
        for text in (*_topics(), *map(_docstrings, _modules())):
            if text:
                yield Passage(split_by_hash(text, HELD_OUT), text, True)


def _modules() -> list[Path]:
    """Return the source files of the standard library, sorted by relative path."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = {name for name in sys.stdlib_module_names if not name.startswith("_sysconfigdata")} - EXCLUDED
    files = [library / f"{name}.py" for name in names]
    files += [file for name in names for file in (library / name).rglob("*.py")]
    found = [file for file in files if file.is_file() and not EXCLUDED & set(file.relative_to(library).parts)]
    if not found:
        raise UserError(f"corpus 'pydocs': {library} holds no standard library source; use a Python that includes it")
    return sorted(found, key=lambda file: file.relative_to(library).as_posix())


def _docstrings(file: Path) -> str:
    tree = ast.parse(file.read_bytes())
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = sorted(
        (node for node in ast.walk(tree) if isinstance(node, kinds)), key=lambda node: getattr(node, "lineno", 0)
    )
    found = (ast.get_docstring(node) for node in nodes)
    texts = [text.strip() for text in found if text and text.strip()]
    return "\n\n".join(texts) + "\n" if texts else ""


def _topics() -> list[str]:
    from pydoc_data.topics import topics

    return [topics[name] for name in sorted(topics)]
