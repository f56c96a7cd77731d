"""The notebooks of docs/notebooks: executed without Jupyter, compared with what they show, and made pages of the site.

    python docs/figures/notebooks.py      # execute all, and store what they print and draw

A cell is executed as Jupyter does it: what it prints, the value of its last line, then its figures. mkdocs reads this
file as a hook, which turns each notebook into a page.
"""

import ast
import base64
import contextlib
import io
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent.parent / "notebooks"
NAMES = (
    "the-scan-in-ten-minutes",
    "train-and-inspect-a-model",
    "the-layer-in-your-own-network",
)
VARIES = "varies"
"""Tag of cells whose numbers and words differ from machine to machine, such as times."""
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?")
TOLERANCE = 0.05
"""How far numbers may be apart, relatively: training rounds differently on other processors."""

Notebook = dict[str, Any]
Output = dict[str, Any]


def read(name: str) -> Notebook:
    notebook: Notebook = json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))
    return notebook


def write(name: str, notebook: Notebook) -> None:
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    (FOLDER / f"{name}.ipynb").write_text(text, encoding="utf-8")


def code_cells(notebook: Notebook) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def execute(notebook: Notebook) -> Iterator[list[Output]]:
    """Runs the code cells in order, in one namespace; yields the outputs of each."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    for number, cell in enumerate(code_cells(notebook), start=1):
        yield _run("".join(cell["source"]), scope, number)


def _run(source: str, scope: dict[str, Any], number: int) -> list[Output]:
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    file, value = f"cell {number}", None
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(tree, file, "exec"), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), file, "eval"), scope)
    outputs: list[Output] = []
    if printed.getvalue():
        outputs.append(
            {
                "output_type": "stream",
                "name": "stdout",
                "text": _lines(printed.getvalue()),
            }
        )
    if value is not None and not source.endswith(";"):
        data = {"text/plain": _lines(repr(value))}
        outputs.append(
            {
                "output_type": "execute_result",
                "execution_count": number,
                "metadata": {},
                "data": data,
            }
        )
    return outputs + list(_figures())


def _figures() -> Iterator[Output]:
    """The figures that pyplot has open, which are closed."""
    if "matplotlib.pyplot" not in sys.modules:
        return
    from matplotlib import pyplot

    for number in pyplot.get_fignums():
        figure, image = pyplot.figure(number), io.BytesIO()
        figure.savefig(
            image,
            format="png",
            dpi=110,
            bbox_inches="tight",
            metadata={"Software": None},
        )
        titles = [axes.get_title(loc) for axes in figure.axes for loc in ("left", "center")]
        alt = "; ".join(title for title in titles if title)
        data = {
            "image/png": base64.b64encode(image.getvalue()).decode(),
            "text/plain": [alt],
        }
        yield {"output_type": "display_data", "metadata": {}, "data": data}
        pyplot.close(figure)


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def shown(output: Output) -> str:
    """The text of an output; of a figure, its title."""
    return "".join(output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"])


def differences(cell: dict[str, Any], outputs: list[Output]) -> list[str]:
    """How the outputs of a cell differ from those that it stores."""
    stored = cell["outputs"]
    kinds = [[one["output_type"] for one in some] for some in (stored, outputs)]
    if kinds[0] != kinds[1]:
        return [f"outputs are {kinds[1]}, and {kinds[0]} are stored"]
    if VARIES in cell["metadata"].get("tags", ()):
        return []
    texts = [(shown(before), shown(now)) for before, now in zip(stored, outputs, strict=True)]
    return [f"stored: {before}now: {now}" for before, now in texts if not _alike(before, now)]


def _alike(before: str, now: str) -> bool:
    numbers = [[float(one.replace(",", "")) for one in NUMBER.findall(text)] for text in (before, now)]
    words = [NUMBER.sub("#", text) for text in (before, now)]
    close = [abs(one - other) <= TOLERANCE * max(abs(one), abs(other)) for one, other in zip(*numbers, strict=False)]
    return words[0] == words[1] and all(close)


def page(name: str, notebook: Notebook) -> tuple[str, dict[str, bytes]]:
    """A notebook as Markdown, and the images of its page by their names."""
    parts: list[str] = []
    images: dict[str, bytes] = {}
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            for other in NAMES:  # a page links to pages
                source = source.replace(f"]({other}.ipynb)", f"]({other}.md)")
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            text = shown(output).rstrip("\n")
            if "image/png" in output.get("data", {}):
                image = f"{name}-{len(images) + 1}.png"
                images[image] = base64.b64decode(output["data"]["image/png"])
                parts.append(f"![{text}]({image})")
            else:
                parts.append(f'```text {{ .output title="Output" }}\n{text}\n```')
    parts.insert(1, f"*This page is a notebook: [download it]({name}.ipynb) to run it.*")
    return "\n\n".join(parts) + "\n", images


def on_files(files: Any, config: Any) -> Any:
    """Adds a page for each notebook; called by mkdocs."""
    from mkdocs.structure.files import File

    for name in NAMES:
        text, images = page(name, read(name))
        files.append(File.generated(config, f"notebooks/{name}.md", content=text))
        for image, content in images.items():
            files.append(File.generated(config, f"notebooks/{image}", content=content))
    return files


def main() -> None:
    import matplotlib
    import torch

    matplotlib.use("agg")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("LOGDEPTH_CACHE", f"{folder}/cache")
        for name in NAMES:
            notebook, workplace = read(name), Path(folder, name)
            workplace.mkdir()
            os.chdir(workplace)
            for number, (cell, outputs) in enumerate(zip(code_cells(notebook), execute(notebook), strict=True), 1):
                cell["outputs"], cell["execution_count"] = outputs, number
            write(name, notebook)
            print(f"{name} is executed")


if __name__ == "__main__":
    main()
