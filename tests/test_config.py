"""Configs as plain data: there and back, strict about fields and values."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logdepth.config import difference, flattened, from_dict, override, to_dict
from logdepth.errors import UserError
from logdepth.recipes import RECIPES
from logdepth.runs import RunConfig, TrainConfig
from tests.small_models import SMALL_MODELS


@dataclass(frozen=True, kw_only=True)
class Inner:
    name: Literal["a", "b"] = "a"


@dataclass(frozen=True, kw_only=True)
class Other:
    size: int = 3


@dataclass(frozen=True, kw_only=True)
class Needs:
    width: int


@dataclass(frozen=True, kw_only=True)
class Outer:
    needs: Needs = Needs(width=1)
    one: Inner | Other = Inner()
    maybe: Inner | None = None
    numbers: tuple[int, ...] = (1, 2)
    path: Path = Path("here")
    rate: float = 0.5
    flag: bool = False
    count: int | None = None


@pytest.mark.parametrize(
    "config",
    [
        Outer(),
        Outer(one=Other(size=9), maybe=Inner(name="b"), numbers=(), path=Path("/x"), rate=1.0, flag=True, count=4),
        *(make() for make in RECIPES.values()),
        *(RunConfig(model=model) for model in SMALL_MODELS.values()),
    ],
)
def test_there_and_back_through_json(config: Any) -> None:
    assert from_dict(type(config), json.loads(json.dumps(to_dict(config)))) == config


def test_missing_fields_take_their_defaults() -> None:
    assert from_dict(Outer, {}) == Outer()
    assert from_dict(Outer, {"rate": 2}) == Outer(rate=2.0)


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        ({"rates": 1.0}, r"config: unknown field 'rates'; did you mean 'rate'\?"),
        ({"one": {"kind": "Inner", "nam": "a"}}, r"config.one: unknown field 'nam'; did you mean 'name'\?"),
        ({"one": {"kind": "Innr"}}, r"config.one.kind: unknown kind 'Innr'; did you mean 'Inner'\?"),
        ({"one": {"size": 3}}, "config.one.kind: unknown kind None"),
        ({"one": 3}, "config.one: expected a mapping of fields"),
        ({"maybe": {"name": "c"}}, "config.maybe.name: expected 'a' or 'b'; got 'c'"),
        ({"numbers": [1, "x"]}, r"config.numbers\[1\]: expected int; got 'x'"),
        ({"rate": "fast"}, "config.rate: expected float; got 'fast'"),
        ({"rate": True}, "config.rate: expected float; got True"),
        ({"flag": 1}, "config.flag: expected bool; got 1"),
        ({"count": 1.5}, "config.count: expected int or null; got 1.5"),
        ({"count": True}, "config.count: expected int or null; got True"),
        ([], "config: expected a mapping of fields of Outer"),
        ({"rate": 10**400}, "config.rate: expected float; got 1000"),
        ({"needs": {}}, "config.needs: the field 'width' of Needs is missing"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(saved: Any, says: str) -> None:
    with pytest.raises(UserError, match=says):
        from_dict(Outer, saved)


def test_values_that_a_config_refuses_are_user_errors() -> None:
    with pytest.raises(UserError, match=r"run.json.train: epochs must be at least 1; got 0"):
        from_dict(RunConfig, {"train": {"epochs": 0}}, "run.json")


def test_paths_with_nul_are_refused() -> None:
    with pytest.raises(UserError, match=r"run.json.train.init_from: a path must not contain the character NUL"):
        from_dict(RunConfig, {"train": {"init_from": "a\0b"}}, "run.json")


CONFIGS = [to_dict(make()) for make in RECIPES.values()]
FIELDS = sorted({name for config in CONFIGS for name in [*flattened(config), "model", "model.operator"]})
ODD = st.one_of(
    st.sampled_from([None, True, 0, -1, 2**63, 10**400, 1e-320, float("nan"), float("-inf"), "", "a\0b", "\ud800"]),
    st.sampled_from([[], [None], ["mlp", 1], ["scan:heads={}"], ["mlp:multiple=1e999"], {}, {"kind": []}, {"": 1}]),
    st.integers(),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.one_of(st.integers(), st.floats(), st.text(max_size=3), st.none()), max_size=3),
)


@settings(max_examples=300)
@given(name=st.sampled_from(sorted(RECIPES)), changes=st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=3))
def test_whatever_json_holds_becomes_a_config_or_a_user_error(name: str, changes: dict[str, Any]) -> None:
    saved = to_dict(RECIPES[name]())
    for field, value in changes.items():
        *outer, last = field.split(".")
        inner = saved
        for one in outer:
            inner = inner[one] if isinstance(inner.get(one), dict) else inner
        inner[last] = value
    try:
        config = from_dict(RunConfig, saved, "file")
    except UserError as error:
        assert str(error).startswith("file")  # noqa: PT017  (most are refused, some are not)
    else:
        assert to_dict(from_dict(RunConfig, to_dict(config))) == to_dict(config)


def test_override_changes_what_is_named_and_nothing_else() -> None:
    config = Outer(maybe=Inner(), rate=0.25)
    assert override(config, {"maybe": {"name": "b"}}) == dataclasses.replace(config, maybe=Inner(name="b"))
    assert override(config, {"one": {"kind": "Other", "size": 5}}) == dataclasses.replace(config, one=Other(size=5))
    assert override(config, {"maybe": None}) == dataclasses.replace(config, maybe=None)
    with pytest.raises(UserError, match="unknown field 'learning_rat'; did you mean 'learning_rate'"):
        override(RunConfig(), {"train": {"learning_rat": 1.0}})
    assert override(RunConfig(), {"train": {"learning_rate": 1.0}}) == RunConfig(train=TrainConfig(learning_rate=1.0))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"train": {"learning_rate": 0.5, "max_steps": 7}, "data": {"corpus": "ptb"}},
        {"model": {"operator": {"kind": "MLPLDRUConfig", "width": 24}}},
        {"model": {"kind": "TransformerConfig", "embed_width": 64}},
        {"train": {"betas": [0.8, 0.9], "evaluate_every": 3}},
    ],
)
def test_the_difference_makes_one_config_of_another(changes: dict[str, Any]) -> None:
    before = RunConfig(train=TrainConfig(max_steps=9))
    after = override(before, changes)
    found = difference(to_dict(before), to_dict(after))
    assert override(before, found) == after
    assert (found == {}) == (changes == {})
    assert "seed" not in found
