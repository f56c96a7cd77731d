"""A study and its terms: what it is of is kept with it, and a worker that wants something else is refused."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import BaseStorage

import logdepth
from logdepth.errors import UserError
from logdepth.recipes import recipe
from logdepth.runs import RunConfig, decisive
from logdepth.sweep.space import Space, described, fields_of
from logdepth.sweep.watch import PLACES

TERMS, TEXT = "logdepth", "logdepth's text"
"""The study's attributes that hold its terms, and which text they are for."""

FEWEST = 5
"""Trials whose losses at a place a median is taken of, at least."""
FIRST_PLACE = PLACES // 4
"""Of a schedule at which a trial may be pruned: losses of the first quarter say little about the last."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """What is searched, how long, and where it is kept."""

    recipe: str
    config: RunConfig
    """The recipe's, with whatever is changed for all trials."""
    space: Space
    trials: int
    """Of the whole study, by all workers together."""
    out: Path
    study: str
    storage: str | None = None
    """URL of a database; without one, a journal in `out`."""
    prune: bool = True
    grace: float = 60.0
    """Seconds after which a trial of another machine whose pulse stands still is taken over."""
    wait: bool = True
    """Whether to stay until the trials of others are done too."""
    data_dir: Path | None = None

    @property
    def terms(self) -> dict[str, Any]:
        """What workers must agree on: names to values."""
        searched = {field for name in self.space for field in fields_of(self.config, name)}
        fixed = {name: value for name, value in decisive(self.config).items() if name not in searched}
        space = {f"--space {name}": one for name, one in described(self.space).items()}
        return {"recipe": self.recipe} | fixed | space


def open_study(search: Search, storage: BaseStorage) -> optuna.Study:
    """The study of this name, made where there is none."""
    study = optuna.create_study(
        study_name=search.study,
        storage=storage,
        direction="minimize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_warmup_steps=FIRST_PLACE, n_min_trials=FEWEST)
        if search.prune
        else optuna.pruners.NopPruner(),
    )
    if TERMS not in study.user_attrs and study.get_trials(deepcopy=False):
        raise UserError(f"the study '{search.study}' was not made by logdepth; choose another --study")
    return study


def agree(study: optuna.Study, search: Search) -> None:
    """Sets the terms of a new study; refuses to join one on others."""
    # Fields that were not there yet when a study began were then as they are in a recipe that does not set them.
    agree_on(study, search.terms, TERMS, absent=decisive(recipe(search.recipe)))


def agree_on(
    study: optuna.Study, terms: Mapping[str, Any], attribute: str, *, absent: Mapping[str, Any] | None = None
) -> None:
    if attribute not in study.user_attrs:
        study.set_user_attr(attribute, {"version": logdepth.__version__, "terms": terms})
    theirs = {name: value for name, value in (absent or {}).items() if name in terms}
    theirs |= study.user_attrs[attribute]["terms"]
    for name in sorted({*theirs, *terms}):
        if theirs.get(name) != terms.get(name):
            here, there = (_shown(one.get(name)) for one in (terms, theirs))
            raise UserError(
                f"the study '{study.study_name}' is another: {name} is {there} there and {here} here; "
                "make them the same, or choose another --study and --out"
            )


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        scale = "log" if value["log"] else value["step"]
        return ":".join(str(part) for part in (value["low"], value["high"], scale) if part is not None)
    return "nothing" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value)
