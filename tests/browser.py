"""Chromium for tests of pages."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@contextmanager
def opened_browser() -> Iterator[Any]:
    """The Chromium that is there, driven by playwright."""
    if CHROMIUM is None:
        if "LOGDEPTH_CI" in os.environ:
            pytest.fail("CI must have Chromium")
        pytest.skip("there is no Chromium")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=CHROMIUM, args=QUIET)
        yield opened
        opened.close()


def brightness(colour: str) -> int:
    """Of `rgb(1, 2, 3)`."""
    return sum(int(part) for part in colour[4:-1].split(","))
