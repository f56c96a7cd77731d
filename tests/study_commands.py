"""`logdepth reproduce` of a small study, for tests: what to type, what it answers, with short lengths."""

import json
from pathlib import Path
from typing import Any

import pytest

from logdepth.cli import main
from tests.tiny_study import CONTEXTS, TIME_TOKENS, override_files

MODELS = ("ar-grc", "transformer-alibi")


@pytest.fixture(name="short_lengths", autouse=True)
def shorten_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("logdepth.reproduce.study.TEXT_CONTEXTS", CONTEXTS)
    monkeypatch.setattr("logdepth.reproduce.study.TIME_TOKENS", TIME_TOKENS)


@pytest.fixture(name="flags", scope="module")
def flags_of_a_small_study(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return override_files(tmp_path_factory.mktemp("overrides"), corpus)


def results_of(out: Path) -> dict[str, Any]:
    """The result files of runs, without how they were made and the checksum, which covers that."""
    found = {}
    for file in sorted((out / "results").glob("text-*.json")):
        found[file.name] = json.loads(file.read_text())
        found[file.name].pop("made")
        found[file.name].pop("sha256")
    return found


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["reproduce", *arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[-1].startswith("logdepth reproduce: ")
    return lines[-1]
