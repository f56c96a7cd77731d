"""The notebooks run, and print what they show; their pages hold all of it."""

import copy

import matplotlib
import pytest
import torch

from notebooks import NAMES, code_cells, differences, execute, page, read


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_show_what_they_compute(name: str, tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(str(tmp_path))
    torch.use_deterministic_algorithms(False)  # as for a reader
    threads = torch.get_num_threads()
    with matplotlib.rc_context({"backend": "agg"}):
        notebook = read(name)
        try:
            for number, (cell, outputs) in enumerate(zip(code_cells(notebook), execute(notebook), strict=True), 1):
                assert not differences(cell, outputs), f"cell {number}; `make notebooks` stores new outputs"
        finally:
            torch.set_num_threads(threads)


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_short_and_stored_as_executed(name: str) -> None:
    notebook = read(name)
    cells = code_cells(notebook)
    assert 10 <= len(notebook["cells"]) <= 20
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    text, images = page(name, notebook)
    for cell in cells:
        assert "".join(cell["source"]) in text
    drawn = [one for cell in cells for one in cell["outputs"] if "image/png" in one.get("data", {})]
    assert len(images) == len(drawn) > 0
    assert all(image.startswith(b"\x89PNG") and f"]({file})" in text for file, image in images.items())


def test_outputs_that_differ_are_found() -> None:
    (cell, *_) = (
        one for one in code_cells(read("the-scan-in-ten-minutes")) if "parenthesised" in "".join(one["source"])
    )
    outputs = copy.deepcopy(cell["outputs"])
    assert differences(cell, outputs) == []
    assert differences(cell, [])
    for before, now, differs in [("13 ", "13.2 ", False), ("13 ", "15 ", True), ("(a b)", "(b a)", True)]:
        changed = copy.deepcopy(outputs)
        changed[0]["text"] = ["".join(outputs[0]["text"]).replace(before, now)]
        assert bool(differences(cell, changed)) == differs
    cell["metadata"] = {"tags": ["varies"]}
    assert differences(cell, changed) == []
