"""The search space of a sweep: what specs mean, and which are refused."""

import pytest

from logdepth.config import flattened, override, to_dict
from logdepth.errors import UserError
from logdepth.recipes import RECIPES, recipe
from logdepth.sweep import Choices, Range, changes, default_specs, parse_space

GRC = recipe("ptb-ar-grc")


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("train.learning_rate=1e-4:1e-2:log", Range(low=1e-4, high=1e-2, log=True)),
        ("model.operator.dropout=0:0.4:0.05", Range(low=0.0, high=0.4, step=0.05)),
        ("train.weight_decay=0:1", Range(low=0.0, high=1.0)),
        ("model.depth=1:3", Range(low=1, high=3)),
        ("train.batch_size=8:64:8", Range(low=8, high=64, step=8)),
        ("model.depth=1,2,3", Choices(values=(1, 2, 3))),
        ("model.post_merge=none,up", Choices(values=("none", "up"))),
        ("train.max_steps=null,10", Choices(values=(None, 10))),
        ("model.tied=true,false", Choices(values=(True, False))),
        ("train.warmup_steps=0,1", Choices(values=(0, 1))),
        ("model.leaf_dropout+model.output_dropout=0:1e-1", Range(low=0.0, high=0.1)),
    ],
)
def test_specs(spec: str, expected: Range | Choices) -> None:
    (found,) = parse_space([spec], GRC).values()
    assert found == expected
    if isinstance(expected, Range) and isinstance(found, Range):
        assert type(found.low) is type(expected.low)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("train.learning_rate", "write NAME=LOW:HIGH"),
        ("train.learning_rate=", "write NAME=LOW:HIGH"),
        ("train.learning_rate=1e-3", "a single value cannot be searched"),
        ("train.learning_rate=1:2:3:4", "write NAME=LOW:HIGH"),
        ("train.learning_rat=1e-4:1e-2", "did you mean 'learning_rate'"),
        ("learning_rate=1e-4:1e-2", "unknown field 'learning_rate'"),
        ("train.learning_rate=1e-2:1e-4", "must go from a lower to a higher value"),
        ("train.learning_rate=1e-3:1e-3", "must go from a lower to a higher value"),
        ("train.learning_rate=0:1:log", "above 0"),
        ("train.learning_rate=-1:1", "learning_rate must be above 0"),
        ("train.learning_rate=low:high", "expected a number; got 'low'"),
        ("train.learning_rate=nan:1", "expected a number; got 'nan'"),
        ("train.weight_decay=0:1:0.3", "divide the range from 0 to 1; got 0.3"),
        ("train.weight_decay=0:1:0", "divide the range from 0 to 1; got 0"),
        ("model.depth=1:3:0.5", "model.depth is an integer, so its step must be one too; got 0.5"),
        ("model.depth=1.5:3", "expected int; got 1.5"),
        ("model.depth=1,two", "expected int; got 'two'"),
        ("model.depth=1,1", "listed twice"),
        ("model.depth=1,[2]", "a choice must be"),
        ("model=1,2", "expected a mapping"),
        ("dropout=0:1", "from 0 to below 1"),
        (
            "data.tokenizer.vocab_size=100,200",
            "data, seed or machine settings, because their losses are not comparable",
        ),
        ("seed=1,2", "losses are not comparable"),
        ("train.warmup_steps+seed=1,2", "losses are not comparable"),
        ("model.leaf_dropout+model.leaf_dropout=0:0.2", "model.leaf_dropout is already searched by"),
        ("model.leaf_dropout+model.depth=0.1:0.2", "expected int; got 0.1"),
        ("train.learning_rate+train.warmup_steps=1:5", "train.warmup_steps is an integer and train.learning_rate"),
        ("train.threads=1,2", "losses are not comparable"),
    ],
)
def test_specs_that_are_refused(spec: str, said: str) -> None:
    with pytest.raises(UserError) as error:
        parse_space([spec], GRC)
    assert str(error.value).startswith(f"--space {spec}: ")
    assert said in str(error.value)


def test_one_value_for_several_fields() -> None:
    name = "model.leaf_dropout+model.output_dropout"
    assert changes(GRC, {name: 0.2}) == {"model": {"leaf_dropout": 0.2, "output_dropout": 0.2}}


def test_a_field_is_searched_once() -> None:
    with pytest.raises(UserError, match=r"model\.leaf_dropout is already searched by 'dropout=0:0\.4'"):
        parse_space(["dropout=0:0.4", "model.leaf_dropout=0:0.2"], GRC)


@pytest.mark.parametrize("name", RECIPES)
def test_the_default_space_fits_every_recipe(name: str) -> None:
    config = recipe(name)
    space = parse_space(default_specs(config), config)
    values = {"train.learning_rate": 3e-4, "train.weight_decay": 0.01, "dropout": 0.35}
    if not any("dropout" in field for field in flattened(to_dict(config.model))):
        values.pop("dropout")
    assert space.keys() == values.keys()
    after = to_dict(override(config, changes(config, values)))
    before = to_dict(config)
    assert after["train"] == before["train"] | {"learning_rate": 3e-4, "weight_decay": 0.01}
    if "post_merge" in after["model"]:
        net = after["model"]["post_merge"] != "none"
        assert after["model"]["post_merge_dropout"] == (0.35 if net else before["model"]["post_merge_dropout"])
        assert after["model"]["embed_dropout"] == after["model"]["leaf_dropout"] == 0.35
        assert after["model"]["output_dropout"] == 0.35
        assert after["model"]["operator"].get("dropout", 0.35) == 0.35
    elif "blocks" in after["model"]:  # those of its blocks keep their values
        assert after["model"] == before["model"] | {"embed_dropout": 0.35, "output_dropout": 0.35}
    elif "dropout" in values:
        assert after["model"] == before["model"] | {"dropout": 0.35}
