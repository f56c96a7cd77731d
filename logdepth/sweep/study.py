"""A study and its terms: the settings stored with the study. A worker with different settings is refused."""

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
from logdepth.sweep.watch import NUM_REPORT_POINTS

TERMS, TEXT = "logdepth", "logdepth's text"
"""The study's user attributes for its terms and for the key of its prepared text."""

MIN_TRIALS_FOR_MEDIAN = 5
"""Minimum number of trials with a loss at a report point before that point prunes trials."""
FIRST_PRUNING_POINT = NUM_REPORT_POINTS // 4
"""First report point that may prune, because losses in the first quarter of a schedule say little about the end."""


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search: its recipe, search space, number of trials and storage."""

    recipe: str
    """Name of the recipe."""
    config: RunConfig
    """The recipe's config with the changes that apply to all trials."""
    space: Space
    """The search space."""
    trials: int
    """Number of trials in the study, over all workers."""
    out: Path
    """Folder of the sweep."""
    study: str
    """Name of the study in its storage."""
    storage: str | None = None
    """Database URL; by default, the study is stored in a journal file in `out`."""
    prune: bool = True
    """Whether to prune trials that are worse than the median."""
    grace: float = 60.0
    """Seconds without a heartbeat after which a trial on another machine is taken over."""
    wait: bool = True
    """Whether to wait until the trials of other workers are finished."""
    data_dir: Path | None = None
    """Root data directory."""

    @property
    def terms(self) -> dict[str, Any]:
        """The settings on which all workers of the study must agree, by name."""
        searched = {field for name in self.space for field in fields_of(self.config, name)}
        fixed = {name: value for name, value in decisive(self.config).items() if name not in searched}
        space = {f"--space {name}": one for name, one in described(self.space).items()}
        return {"recipe": self.recipe} | fixed | space


def open_study(search: Search, storage: BaseStorage) -> optuna.Study:
    """Open the study, or create it if it does not exist."""
    study = optuna.create_study(
        study_name=search.study,
        storage=storage,
        direction="minimize",
        load_if_exists=True,
        pruner=optuna.pruners.MedianPruner(n_warmup_steps=FIRST_PRUNING_POINT, n_min_trials=MIN_TRIALS_FOR_MEDIAN)
        if search.prune
        else optuna.pruners.NopPruner(),
    )
    if TERMS not in study.user_attrs and study.get_trials(deepcopy=False):
        raise UserError(f"the study '{search.study}' was not created by logdepth; choose another --study")
    return study


def check_terms(study: optuna.Study, search: Search) -> None:
    """Store the terms of a new study. For an existing study, raise a UserError if its terms differ."""
    # A field added after a study was created has the value that the recipe gives it.
    check_attribute(study, search.terms, TERMS, absent=decisive(recipe(search.recipe)))


def check_attribute(
    study: optuna.Study, terms: Mapping[str, Any], attribute: str, *, absent: Mapping[str, Any] | None = None
) -> None:
    """Store `terms` under an attribute of a study, or raise a UserError if the stored terms differ.

    `absent` holds the values of terms that the study does not store.
    """
    if attribute not in study.user_attrs:
        study.set_user_attr(attribute, {"version": logdepth.__version__, "terms": terms})
    theirs = {name: value for name, value in (absent or {}).items() if name in terms}
    theirs |= study.user_attrs[attribute]["terms"]
    for name in sorted({*theirs, *terms}):
        if theirs.get(name) != terms.get(name):
            here, there = (_shown(one.get(name)) for one in (terms, theirs))
            raise UserError(
                f"the study '{study.study_name}' has other settings: {name} is {there} in the study and {here} in this "
                "command; use the study's value, or choose another --study and --out"
            )


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        scale = "log" if value["log"] else value["step"]
        return ":".join(str(part) for part in (value["low"], value["high"], scale) if part is not None)
    return "nothing" if value is None else ",".join(map(str, value)) if isinstance(value, list) else str(value)
