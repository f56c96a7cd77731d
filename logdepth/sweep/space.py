"""The search space: which fields of a run's config are searched, and where. It knows configs, not who searches them.

train.learning_rate=1e-4:1e-2:log      a range, on a logarithmic scale
model.operator.dropout=0:0.4:0.05      a range, in steps
model.depth=1,2,3                      a choice
dropout=0:0.4:0.05                     every dropout that the model has, at once
model.leaf_dropout+model.output_dropout=0:0.4      one value for several fields

The paper searched learning rate, L2 and dropout, and gives no ranges: those of `DEFAULT` are ours.
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
"""The name that stands for every dropout of a model."""
DEFAULT = ("train.learning_rate=5e-5:5e-3:log", "train.weight_decay=1e-6:0.3:log", "dropout=0:0.4:0.05")
FORMS = "write NAME=LOW:HIGH, NAME=LOW:HIGH:log, NAME=LOW:HIGH:STEP or NAME=ONE,ANOTHER,…"


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers from low to high; whole numbers where the field's are."""

    low: float
    high: float
    step: float | None = None
    log: bool = False

    @property
    def extremes(self) -> tuple[Scalar, ...]:
        return self.low, self.high


@dataclass(frozen=True, kw_only=True)
class Choices:
    """One of several values."""

    values: tuple[Scalar, ...]

    @property
    def extremes(self) -> tuple[Scalar, ...]:
        return self.values


Space = dict[str, Range | Choices]
"""Name of a field → where it is searched."""


def default_specs(config: RunConfig) -> list[str]:
    """The paper's space, without dropout for models that have none."""
    return [spec for spec in DEFAULT if not spec.startswith(DROPOUT) or _dropouts(config.model)]


def parse_space(specs: Sequence[str], config: RunConfig) -> Space:
    """The space that the specs describe, every end and choice of it tried on the config."""
    space: Space = {}
    owners: dict[str, str] = {}
    for spec in specs:
        name, equals, text = spec.partition("=")
        try:
            if not equals or not text:
                raise UserError(FORMS)
            if any(part == "seed" or part.startswith("data.") or part in MACHINE_FIELDS for part in name.split("+")):
                raise UserError("losses on other text or tokens, seeds and machines do not compare; set it by its flag")
            dimension = _parsed(text)
            space[name] = _as_the_field_has_it(config, name, dimension)
            for field in fields_of(config, name):
                if field in owners:
                    raise UserError(f"{field} is searched by '{owners[field]}' already; leave one of them out")
                owners[field] = spec
        except UserError as error:
            dotted = "" if "." in name or name == DROPOUT else "; names are dotted, as train.learning_rate"
            raise UserError(f"--space {spec}: {error}{dotted}") from None
    return space


def fields_of(config: RunConfig, name: str) -> list[str]:
    """The fields of a config, dotted, that a name of the space stands for."""
    found = []
    for part in name.split("+"):
        dropouts = [f"model.{field}" for field in _dropouts(config.model)] if part == DROPOUT else []
        if part == DROPOUT and not dropouts:
            raise UserError("this model has no dropout to search")
        found += dropouts or [part]
    return found


def changes(config: RunConfig, values: Mapping[str, Scalar]) -> dict[str, Any]:
    """What to change in a config for a point of the space, nested as `logdepth.config` nests."""
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
    """The space as what JSON can hold."""
    return {
        name: list(one.values) if isinstance(one, Choices) else dataclasses.asdict(one) for name, one in space.items()
    }


def _parsed(text: str) -> Range | Choices:
    if "," in text:
        values = tuple(_scalar(part) for part in text.split(","))
        if len({json.dumps(value) for value in values}) < len(values):
            raise UserError("the same choice comes twice")
        return Choices(values=values)
    parts = text.split(":")
    if not 2 <= len(parts) <= 3:
        raise UserError(f"one value leaves nothing to search; {FORMS}" if len(parts) == 1 else FORMS)
    low, high = _number(parts[0]), _number(parts[1])
    if low >= high:
        raise UserError(f"the range begins at {low} and ends at {high}; put the lower one first")
    if len(parts) == 2:
        return Range(low=low, high=high)
    if parts[2] == "log":
        if low <= 0:
            raise UserError(f"a logarithmic range must begin above 0; got {low}")
        return Range(low=low, high=high, log=True)
    step = _number(parts[2])
    if step <= 0 or (Decimal(str(high)) - Decimal(str(low))) % Decimal(str(step)):
        raise UserError(f"steps of {step} do not lead from {low} to {high}")
    return Range(low=low, high=high, step=step)


def _number(text: str) -> float:
    """Whole numbers stay whole."""
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
        raise UserError(f"a choice must be a word, a number, true, false or null; got {text}")
    return value  # type: ignore[no-any-return]


def _as_the_field_has_it(config: RunConfig, name: str, dimension: Range | Choices) -> Range | Choices:
    """The dimension with whole numbers made fractional where the field's are; what the config refuses is an error."""
    for value in dimension.extremes:
        override(config, changes(config, {name: value}))
    if isinstance(dimension, Choices):
        return dimension
    fields = fields_of(config, name)
    at_low = override(config, changes(config, {name: dimension.low}))
    fractional = [field for field in fields if isinstance(_held(at_low, field), float)]
    whole = [field for field in fields if field not in fractional]
    if fractional and whole:
        raise UserError(f"{whole[0]} is a whole number and {fractional[0]} is not: no range fits both")
    if fractional:
        step = None if dimension.step is None else float(dimension.step)
        return replace(dimension, low=float(dimension.low), high=float(dimension.high), step=step)
    if isinstance(dimension.step, float):
        raise UserError(f"{whole[0]} is a whole number; steps of {dimension.step} are not")
    return dimension


def _held(config: RunConfig, field: str) -> Any:
    value: Any = to_dict(config)
    for part in field.split("."):
        value = value[part]
    return value


def _dropouts(model: Any) -> list[str]:
    """Fields of a model's config named `dropout` or `…_dropout`, also of configs in it, that have something to drop."""
    found = []
    for field in dataclasses.fields(model):
        value = getattr(model, field.name)
        if dataclasses.is_dataclass(value):
            found += [f"{field.name}.{inner}" for inner in _dropouts(value)]
        elif field.name == "dropout" or field.name.endswith("_dropout"):
            part = getattr(model, field.name.removesuffix("_dropout"), None)
            if part != "none":  # post_merge_dropout, where there is no post-merge net
                found.append(field.name)
    return found
