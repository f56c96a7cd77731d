"""Blocks in one word: every config has a text, every text a config, and mistakes are told in one line."""

import contextlib
import dataclasses
import typing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logdepth.blocks import BLOCKS, AttentionConfig, MLPConfig, PaperLayerConfig, ScanConfig
from logdepth.blocks.spec import block_config, block_text
from logdepth.config import from_dict, to_dict
from logdepth.errors import UserError
from logdepth.models import LMConfig
from logdepth.operators import MLPLDRUConfig
from tests.small_models import LM_BLOCKS

every_block = pytest.mark.parametrize("name", BLOCKS)


@every_block
def test_a_name_alone_is_the_default(name: str) -> None:
    assert block_config(name) == block_config(f"{name}:") == BLOCKS[name]()
    assert block_text(BLOCKS[name]()) == name


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("attention:window=128", AttentionConfig(window=128)),
        ("attention:positions=alibi,qk-norm=true,heads=4", AttentionConfig(positions="alibi", qk_norm=True, heads=4)),
        ("attention: heads = 4 , window = null", AttentionConfig(heads=4)),
        ("mlp:activation=gelu,multiple=2", MLPConfig(activation="gelu", multiple=2.0)),
        ("scan:operator=mlp-ldru,heads=2,gate=false", ScanConfig(operator="mlp-ldru", heads=2, gate=False)),
        (
            "paper-layer:operator.kind=MLPLDRUConfig,operator.width=8,residual=false",
            PaperLayerConfig(operator=MLPLDRUConfig(width=8), residual=False),
        ),
    ],
)
def test_fields_are_set_by_name(text: str, config: Any) -> None:
    assert block_config(text) == config
    assert block_config(block_text(config)) == config


@pytest.mark.parametrize("text", sorted({text for blocks in LM_BLOCKS.values() for text in blocks}))
def test_texts_and_configs_go_round(text: str) -> None:
    config = block_config(text)
    short = block_text(config)
    assert block_config(short) == config
    assert block_text(block_config(short)) == short
    assert short.count("=") <= text.count("=")


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Configs of a block with any fields of simple types changed, where the config accepts them."""
    hints = typing.get_type_hints(kind)
    strategies: dict[str, st.SearchStrategy[Any]] = {}
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if typing.get_origin(hint) is typing.Literal:
            strategies[field.name] = st.sampled_from(typing.get_args(hint))
        elif hint is bool:
            strategies[field.name] = st.booleans()
        elif hint is float:
            strategies[field.name] = st.floats(0, 0.99)
        elif hint is int:
            strategies[field.name] = st.integers(1, 1000)
        elif hint == int | None:
            strategies[field.name] = st.none() | st.integers(1, 1000)

    def accepted(fields: dict[str, Any]) -> Any:
        with contextlib.suppress(ValueError):
            return kind(**fields)
        return None

    return st.fixed_dictionaries({}, optional=strategies).map(accepted).filter(bool)


@every_block
@given(data=st.data())
def test_every_config_comes_back_from_its_text(name: str, data: st.DataObject) -> None:
    config = data.draw(values_of(BLOCKS[name]))
    text = block_text(config)
    assert block_config(text) == config
    assert text.split(":")[0] == name
    assert " " not in text, "a word on the command line"


def test_models_take_texts_and_save_configs() -> None:
    config = LMConfig(dim=16, blocks=("scan:heads=2", MLPConfig(), "attention:window=8"))
    assert config.blocks == (ScanConfig(heads=2), MLPConfig(), AttentionConfig(window=8))
    saved = to_dict(config)
    assert [block["kind"] for block in saved["blocks"]] == ["ScanConfig", "MLPConfig", "AttentionConfig"]
    assert from_dict(LMConfig, saved) == config
    assert from_dict(LMConfig, saved | {"blocks": ["scan:heads=2", "mlp", "attention:window=8"]}) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "there is no block ''; there are: "),
        ("lstm", "there is no block 'lstm'; there are: "),
        ("atention", "there is no block 'atention'; did you mean 'attention'?"),
        ("attention window=8", "did you mean 'attention'?"),
        ("attention:window", "block 'attention:window': expected field=value; got 'window'"),
        ("attention:window=8,", "block 'attention:window=8,': expected field=value; got ''"),
        ("attention:windw=8", "block 'attention': unknown field 'windw'; did you mean 'window'?"),
        ("mlp:=3", "unknown field ''; there are: activation"),
        ("attention:window=none", "block 'attention'.window: expected int or null; got 'none'"),
        ("attention:heads=2.0", "heads: expected int; got 2.0"),
        ("attention:heads.first=2", "heads: expected int; got {'first': 2}"),
        ("attention:positions=rop", "expected 'none' or 'alibi' or 'rope'; got 'rop'"),
        ("attention:heads=0", "heads and window must be at least 1; got 0 and None"),
        ("attention:dropout=NaN", "dropout must be from 0 to below 1; got nan"),
        ("attention:heads=2,heads=4", "block 'attention:heads=2,heads=4': heads is given more than once; give it once"),
        ("scan:gate=yes", "block 'scan'.gate: expected bool; got 'yes'"),
        ("scan:operator=lstm", "operator 'lstm' is unknown; choose from "),
        ("mlp:multiple=Infinity", "multiple must be above 0 and at most 1,000,000; got inf"),
        ("mlp:multiple=1e308", "multiple must be above 0 and at most 1,000,000; got 1e+308"),
        ("memory:heads=" + "9" * 6000, "block 'memory'.heads: expected int; got '9999"),
        ("memory:heads=" + "[" * 100_000, "block 'memory'.heads: expected int; got '[[[["),
        ("memory:chunk=3", "chunk must be a power of two; got 3"),
        ("memory:write-strength=2.5", "write_strength must be above 0 and at most 2; got 2.5"),
        ("paper-layer:operator=grc", "operator: expected a mapping of fields; got 'grc'"),
        ("paper-layer:operator.kind=GRU", "unknown kind 'GRU'; there are: GRCConfig, MLPLDRUConfig"),
        ("paper-layer:operator=grc,operator.width=8", "give operator a value or values for its fields, not both"),
        ("paper-layer:operator.width=8,operator=grc", "operator is given more than once; give it once"),
    ],
)
def test_mistakes_are_one_line(text: str, message: str) -> None:
    with pytest.raises(UserError) as told:
        block_config(text)
    assert "\n" not in str(told.value)
    assert message in str(told.value)
    with pytest.raises(UserError) as again:
        LMConfig(blocks=(text,))
    assert str(again.value) == str(told.value)
