"""The search space: which fields of a run's config are searched, and over which values.

train.learning_rate=1e-4:1e-2:log      a range on a logarithmic scale
model.operator.dropout=0:0.4:0.05      a range in steps
model.depth=1,2,3                      a choice
dropout=0:0.4:0.05                     one value for all dropouts of the model but those of blocks
model.leaf_dropout+model.output_dropout=0:0.4      one value for several fields

The paper searches learning rate, L2 regularisation and dropout but gives no ranges. The ranges in `DEFAULT` are ours.
"""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from logdepth.config import override, to_dict
from logdepth.errors import UserError
from logdepth.runs import MACHINE_FIELDS, RunConfig

Scalar = str | int | float | bool | None
DROPOUT = "dropout"
"""The name that stands for all dropouts of a model."""
DEFAULT = ("train.learning_rate=5e-5:5e-3:log", "train.weight_decay=1e-6:0.3:log", "dropout=0:0.4:0.05")
FORMS = "write NAME=LOW:HIGH, NAME=LOW:HIGH:log, NAME=LOW:HIGH:STEP or NAME=ONE,ANOTHER,…"


@dataclass(frozen=True, kw_only=True)
class Range:
    """A range of numbers from `low` to `high`, both inclusive. For an integer field all numbers are integers."""

    low: float
    high: float
    step: float | None = None
    log: bool = False

    @property
    def extremes(self) -> tuple[Scalar, ...]:
        return self.low, self.high


@dataclass(frozen=True, kw_only=True)
class Choices:
    """A choice among several values."""

    values: tuple[Scalar, ...]

    @property
    def extremes(self) -> tuple[Scalar, ...]:
        return self.values


Space = dict[str, Range | Choices]
"""Maps a name, which stands for one or more fields, to the values to search."""


def default_specs(config: RunConfig) -> list[str]:
    """Return the default search space: the fields that the paper searches. Dropout only if the model has any."""
    return [spec for spec in DEFAULT if not spec.startswith(DROPOUT) or _dropouts(config.model)]


def parse_space(specs: Sequence[str], config: RunConfig) -> Space:
    """Parse the specs of a search space. Both ends of each range and all choices are checked against the config."""
    space: Space = {}
    owners: dict[str, str] = {}
    for spec in specs:
        name, equals, text = spec.partition("=")
        try:
            if not equals or not text:
                raise UserError(FORMS)
            if any(part == "seed" or part.startswith("data.") or part in MACHINE_FIELDS for part in name.split("+")):
                raise UserError(
                    "a search cannot cover data, seed or machine settings, because their losses are not comparable; "
                    "set the field with its flag"
                )
            dimension = _parsed(text)
            space[name] = _checked(config, name, dimension)
            for field in fields_of(config, name):
                if field in owners:
                    raise UserError(f"{field} is already searched by '{owners[field]}'; remove one of the two")
                owners[field] = spec
        except UserError as error:
            dotted = "" if "." in name or name == DROPOUT else "; a name has dots, such as train.learning_rate"
            raise UserError(f"--space {spec}: {error}{dotted}") from None
    return space


def fields_of(config: RunConfig, name: str) -> list[str]:
    """Return the dotted names of the config fields that a name of the space stands for."""
    found = []
    for part in name.split("+"):
        dropouts = [f"model.{field}" for field in _dropouts(config.model)] if part == DROPOUT else []
        if part == DROPOUT and not dropouts:
            raise UserError("this model has no dropout; remove 'dropout' from the space")
        found += dropouts or [part]
    return found


def changes(config: RunConfig, values: Mapping[str, Scalar]) -> dict[str, Any]:
    """Return the changes to a config for a point of the space, as a nested dict for `logdepth.config.override`."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        for field in fields_of(config, name):
            *path, last = field.split(".")
            inner = nested
            for part in path:
                inner = inner.setdefault(part, {})
            inner[last] = value
    return nested


def described(space: Space) -> dict[str, Any]:
    """Return the space as JSON-compatible values."""
    return {
        name: list(one.values) if isinstance(one, Choices) else dataclasses.asdict(one) for name, one in space.items()
    }


def _parsed(text: str) -> Range | Choices:
    if "," in text:
        values = tuple(_scalar(part) for part in text.split(","))
        if len({json.dumps(value) for value in values}) < len(values):
            raise UserError("a choice is listed twice; remove one")
        return Choices(values=values)
    parts = text.split(":")
    if not 2 <= len(parts) <= 3:
        raise UserError(f"a single value cannot be searched; {FORMS}" if len(parts) == 1 else FORMS)
    low, high = _number(parts[0]), _number(parts[1])
    if low >= high:
        raise UserError(f"a range must go from a lower to a higher value; got {low} to {high}")
    if len(parts) == 2:
        return Range(low=low, high=high)
    if parts[2] == "log":
        if low <= 0:
            raise UserError(f"a logarithmic range must start above 0; got {low}")
        return Range(low=low, high=high, log=True)
    step = _number(parts[2])
    if step <= 0 or (Decimal(str(high)) - Decimal(str(low))) % Decimal(str(step)):
        raise UserError(f"a step must be positive and divide the range from {low} to {high}; got {step}")
    return Range(low=low, high=high, step=step)


def _number(text: str) -> float:
    """Parse an int if possible, otherwise a finite float."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if math.isfinite(number):
            return number
    raise UserError(f"expected a number; got '{text}'")


def _scalar(text: str) -> Scalar:
    try:
        value = json.loads(text)
    except json.JSONDecodeError:
        return text
    if isinstance(value, dict | list) or (isinstance(value, float) and not math.isfinite(value)):
        raise UserError(f"a choice must be a word, a finite number, true, false or null; got {text}")
    return value  # type: ignore[no-any-return]


def _checked(config: RunConfig, name: str, dimension: Range | Choices) -> Range | Choices:
    """Check a dimension against the config, and convert an integer range to floats if its field is a float."""
    for value in dimension.extremes:
        override(config, changes(config, {name: value}))
    if isinstance(dimension, Choices):
        return dimension
    fields = fields_of(config, name)
    at_low = override(config, changes(config, {name: dimension.low}))
    floats = [field for field in fields if isinstance(_value_of(at_low, field), float)]
    integers = [field for field in fields if field not in floats]
    if floats and integers:
        raise UserError(f"{integers[0]} is an integer and {floats[0]} is a float; search them separately")
    if floats:
        step = None if dimension.step is None else float(dimension.step)
        return replace(dimension, low=float(dimension.low), high=float(dimension.high), step=step)
    if isinstance(dimension.step, float):
        raise UserError(f"{integers[0]} is an integer, so its step must be one too; got {dimension.step}")
    return dimension


def _value_of(config: RunConfig, field: str) -> Any:
    value: Any = to_dict(config)
    for part in field.split("."):
        value = value[part]
    return value


def _dropouts(model: Any) -> list[str]:
    """Return the names of all dropout fields of a model's config and its nested configs.

    A field `PART_dropout` is skipped if PART is "none".
    """
    found = []
    for field in dataclasses.fields(model):
        value = getattr(model, field.name)
        if dataclasses.is_dataclass(value):
            found += [f"{field.name}.{inner}" for inner in _dropouts(value)]
        elif field.name == "dropout" or field.name.endswith("_dropout"):
            part = getattr(model, field.name.removesuffix("_dropout"), None)
            if part != "none":  # post_merge_dropout has no effect without a post-merge net
                found.append(field.name)
    return found
