"""Models built without memory for their weights: of the right sizes, and without starting torch's compiler."""

import subprocess
import sys

import pytest
import torch

from logdepth.models import unallocated
from tests.small_models import SMALL_MODELS, VOCAB

EVERY_RECIPE = """
import sys
from logdepth.recipes import RECIPES, parameters_of
for make in RECIPES.values():
    assert parameters_of(make()) > 0
assert "torch._dynamo" not in sys.modules
"""


@pytest.mark.parametrize("name", SMALL_MODELS)
def test_it_has_the_shapes_of_the_model(name: str) -> None:
    with unallocated():
        found = SMALL_MODELS[name].build(VOCAB)
    expected = SMALL_MODELS[name].build(VOCAB)
    assert all(one.is_meta for one in found.parameters())
    shapes = [{name: (one.shape, one.dtype) for name, one in model.state_dict().items()} for model in (found, expected)]
    assert shapes[0] == shapes[1]


def test_outside_of_it_models_have_values() -> None:
    with unallocated():
        pass
    assert torch.nn.init.normal_(torch.zeros(9)).any()


def test_no_recipe_starts_the_compiler() -> None:
    """Its import takes about a second, which every command that loads a run would pay."""
    subprocess.run([sys.executable, "-c", EVERY_RECIPE], check=True)
