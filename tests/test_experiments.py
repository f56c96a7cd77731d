"""The configs in experiments/: each is one that `reproduce` takes, of a model no larger than the paper's."""

import json
from pathlib import Path

import pytest

from logdepth.config import override
from logdepth.recipes import parameters_of, recipe

FILES = sorted((Path(__file__).parent.parent / "experiments").glob("*.json"))


def test_there_are_some() -> None:
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_experiment_changes_a_recipe(path: Path) -> None:
    saved = json.loads(path.read_text())
    name = saved.get("recipe", f"{path.stem.split('-')[0]}-ar-grc")
    plain = recipe(name)
    changed = override(plain, saved.get("config", saved))
    assert changed != plain
    assert 0.95 * parameters_of(plain) < parameters_of(changed) <= parameters_of(plain)
