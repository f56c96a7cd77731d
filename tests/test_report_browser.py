"""The report in a real browser: it renders, says nothing on the console, fits a phone, and asks for nothing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from logdepth.report import write_report
from logdepth.results import write_result
from tests.browser import brightness, opened_browser
from tests.tiny_study import made_up_run, made_up_times

ROWS = ("ar-grc", "ar-mlp-ldru", "transformer-alibi", "transformer-sinusoidal")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with opened_browser() as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    for number, row in enumerate(ROWS):
        write_result(folder / "results" / f"ptb-{row}-0.json", made_up_run(row, perplexity=20.0 + number))
    write_result(folder / "results" / "timing-cpu.json", made_up_times(*ROWS))
    return write_report(folder)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_it_renders(browser: Any, report: Path, scheme: str, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 844}, color_scheme=scheme)
    said: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(report.as_uri())
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [report.as_uri()]
    assert page.title() == "logdepth: ptb"
    assert page.evaluate("document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    figures = page.locator("figure svg").all()
    assert len(figures) == 4
    for figure in figures:
        box = figure.bounding_box()
        assert box["width"] > 250
        assert box["height"] > 120
    ink, paper = (page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
    assert (brightness(ink) > brightness(paper)) == (scheme == "dark")
    label = "document.querySelector('figure svg [id$=\"-text_1\"] g')"
    assert page.evaluate(f"getComputedStyle({label}).fill") == ink, "labels of figures are in the colour of the text"
    assert page.locator("#table-perplexity tbody tr").count() == len(ROWS)
    page.locator("details summary").first.click()
    assert '"corpus": "ptb"' in page.locator("details pre").first.inner_text()
    page.close()


def test_ids_are_each_there_once(browser: Any, report: Path) -> None:
    page = browser.new_page()
    page.goto(report.as_uri())
    doubled = (
        "ids = [...document.querySelectorAll('[id]')].map(one => one.id); ids.filter((id, n) => ids.indexOf(id) < n)"
    )
    assert page.evaluate(doubled) == []
    page.close()
