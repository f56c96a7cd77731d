"""Strict conversion of frozen dataclasses to JSON-compatible dicts and back.

If a field can hold one of several dataclasses, the class name is stored under "kind".
"""

import dataclasses
import sys
import types
import typing
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from logdepth.errors import UserError, did_you_mean

Config = TypeVar("Config")
KIND = "kind"
MAX_SHOWN = 200
"""Maximum characters of a wrong value that a message shows."""


def to_dict(config: Any) -> dict[str, Any]:
    """Convert a config to a JSON-compatible dict. It includes defaults, because a record must not change with them."""
    hints = typing.get_type_hints(type(config))
    return {field.name: _encode(hints[field.name], getattr(config, field.name)) for field in dataclasses.fields(config)}


def from_dict(cls: type[Config], saved: Any, where: str = "config") -> Config:
    """Create a config from the output of `to_dict`. Missing fields get their defaults; unknown fields are errors."""
    if not isinstance(saved, dict):
        raise UserError(f"{where}: expected a mapping of fields of {cls.__name__}; got {_shown(saved)}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in saved:
        if name not in fields:
            raise UserError(f"{where}: unknown field '{name}'{did_you_mean(str(name), fields)}")
    required = (name for name, one in fields.items() if _has_no_default(one))
    for name in required:
        if name not in saved:
            raise UserError(f"{where}: the field '{name}' of {cls.__name__} is missing")
    values = {name: _decode(hints[name], value, f"{where}.{name}") for name, value in saved.items()}
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {error}") from None


def flattened(nested: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten a nested dict, such as the output of `to_dict`, to dotted names."""
    flat: dict[str, Any] = {}
    for name, value in nested.items():
        flat |= flattened(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat


def _shown(value: Any) -> str:
    """Return a value as messages show it: not longer than a line."""
    shown = repr(value)
    return shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}…"


def _has_no_default(field: "dataclasses.Field[Any]") -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def override(config: Config, changes: dict[str, Any], where: str = "config") -> Config:
    """Return a config with some fields changed. `changes` is nested like the output of `to_dict`."""
    return from_dict(type(config), _merged(to_dict(config), changes, where), where)


def difference(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the changes that `override` needs to turn one config into another, both as outputs of `to_dict`."""
    if before.get(KIND) != after.get(KIND):
        return after
    found = {}
    for name, value in after.items():
        old = before.get(name)
        if isinstance(old, dict) and isinstance(value, dict):
            if inner := difference(old, value):
                found[name] = inner
        elif name not in before or value != old:
            found[name] = value
    return found


def _merged(saved: dict[str, Any], changes: Any, where: str) -> dict[str, Any]:
    if not isinstance(changes, dict):
        raise UserError(f"{where}: expected a mapping of fields; got {_shown(changes)}")
    if KIND in changes and changes[KIND] != saved.get(KIND):
        return changes
    merged = dict(saved)
    for name, value in changes.items():
        old = saved.get(name)
        merged[name] = _merged(old, value, f"{where}.{name}") if isinstance(old, dict) and value is not None else value
    return merged


def _encode(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        kind = {KIND: type(value).__name__} if len(_dataclasses_of(hint)) > 1 else {}
        return kind | to_dict(value)
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        item_hint = _item_hint(hint)
        return [_encode(item_hint, item) for item in value]
    if isinstance(value, dict):
        return {key: _encode(None, item) for key, item in value.items()}
    return value


def _item_hint(hint: Any) -> Any:
    """The type of a tuple's items."""
    options = (typing.get_args(option) for option in _options(hint) if typing.get_origin(option) is tuple)
    return next((arguments[0] for arguments in options if arguments), None)


def _decode(hint: Any, value: Any, where: str) -> Any:
    options = _options(hint)
    if value is None and type(None) in options:
        return None
    kinds = _dataclasses_of(hint)
    if kinds and not (isinstance(value, str) and str in options):
        return _decode_dataclass(kinds, value, where)
    for option in options:
        origin, arguments = typing.get_origin(option), typing.get_args(option)
        if origin is Literal and value in arguments:
            return value
        if option is Any:
            return value
        if origin is dict and isinstance(value, dict):
            return {key: _decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
        if origin in (tuple, list) and isinstance(value, list | tuple):
            return origin(_decode(arguments[0], item, f"{where}[{number}]") for number, item in enumerate(value))
        if option is float and _is_number(value):
            return float(value)
        if option is int and isinstance(value, int) and not isinstance(value, bool):
            return value
        if option is Path and isinstance(value, str | Path):
            if "\0" in str(value):
                raise UserError(f"{where}: a path must not contain the character NUL; got {str(value)!r}")
            return Path(value)
        if option in (str, bool) and isinstance(value, option):
            return value
    raise UserError(f"{where}: expected {_described(options)}; got {_shown(value)}")


def _is_number(value: Any) -> bool:
    """Return whether a value is a float, or an integer that is small enough to become one."""
    is_integer = isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, float) or (is_integer and abs(value) <= sys.float_info.max)


def _decode_dataclass(kinds: dict[str, type], value: Any, where: str) -> Any:
    if len(kinds) == 1 or not isinstance(value, dict):
        return from_dict(next(iter(kinds.values())), value, where)
    rest = dict(value)
    kind = rest.pop(KIND, None)
    if not isinstance(kind, str) or kind not in kinds:
        raise UserError(f"{where}.{KIND}: unknown kind {kind!r}{did_you_mean(str(kind), kinds)}")
    return from_dict(kinds[kind], rest, where)


def _options(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return typing.get_args(hint)
    return (hint,)


def _dataclasses_of(hint: Any) -> dict[str, type]:
    options = [option for option in _options(hint) if isinstance(option, type)]
    return {option.__name__: option for option in options if dataclasses.is_dataclass(option)}


def _described(options: tuple[Any, ...]) -> str:
    words: list[str] = []
    for option in options:
        if typing.get_origin(option) is Literal:
            words.extend(repr(choice) for choice in typing.get_args(option))
        elif option is type(None):
            words.append("null")
        else:
            words.append(getattr(option, "__name__", str(option)))
    return " or ".join(words)
