"""Comparing runs on disk."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from logdepth.runs import RunFolder


def same_files(one: Path, other: Path) -> None:
    """Two runs ended in the same bits."""
    for name in ("best", "last", "checkpoint"):
        left, right = (load_file(folder / f"{name}.safetensors") for folder in (one, other))
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left), name
    assert measured(one) == measured(other)


def measured(folder: Path) -> list[dict[str, Any]]:
    """The metrics, without what a clock said."""
    lines = RunFolder(folder).read_metrics()
    return [{key: value for key, value in line.items() if "second" not in key} for line in lines]
