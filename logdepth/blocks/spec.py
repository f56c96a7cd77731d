"""Blocks in one word: `attention` or `attention:window=128,positions=rope`, as the command line and LM take them."""

import json
from typing import Any

from logdepth.blocks import BLOCKS, BlockConfig
from logdepth.config import difference, flattened, override, to_dict
from logdepth.errors import UserError, did_you_mean


def block_config(text: str) -> BlockConfig:
    """The config of a block that is written as `name` or `name:field=value,…`."""
    name, _, rest = text.partition(":")
    if name not in BLOCKS:
        raise UserError(f"there is no block '{name}'{did_you_mean(name, BLOCKS)}")
    fields: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        field, equals, value = part.partition("=")
        if not equals:
            raise UserError(f"block '{text}': expected field=value; got '{part}'")
        _set(fields, field.strip().replace("-", "_").split("."), _value(value.strip()), f"block '{text}'")
    config: BlockConfig = override(BLOCKS[name](), fields, f"block '{name}'")
    return config


def block_text(config: BlockConfig) -> str:
    """The shortest text from which `block_config` makes this config."""
    name = next(name for name, kind in BLOCKS.items() if kind is type(config))
    default, own = to_dict(BLOCKS[name]()), to_dict(config)
    changed = [f"{field}={_text(value)}" for field, value in flattened(difference(default, own)).items()]
    return f"{name}:{','.join(changed)}" if changed else name


def _set(fields: dict[str, Any], path: list[str], value: Any, where: str) -> None:
    *outer, last = path
    for name in outer:
        fields = fields.setdefault(name, {})
        if not isinstance(fields, dict):
            raise UserError(f"{where}: give {name} a value or values for its fields, not both")
    if last in fields:
        raise UserError(f"{where}: {'.'.join(path)} is given more than once; give it once")
    fields[last] = value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):  # also a number of too many digits, and brackets that are nested too deeply
        return text


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
