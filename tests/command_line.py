"""Verbs run in this process, and what they say."""

import math

import pytest

from logdepth.cli import main


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which a verb refuses."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "logdepth.progress.PLAIN_SECONDS", math.inf
        )  # a slow machine says how far it is before it refuses
        assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("logdepth ")
    assert len(line) < 1_200
    return line
