"""`logdepth train`: a recipe, with any field changed; or a run that goes on."""

import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from logdepth.cli.output import print_json
from logdepth.cli.parsing import Switch, named_first, parse, value_of
from logdepth.config import from_dict, override
from logdepth.errors import UserError
from logdepth.progress import in_words
from logdepth.recipes import RECIPES, changes_in, recipe
from logdepth.runs import RunConfig
from logdepth.train import Interrupted, TrainState, resume, train


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a recipe; `logdepth recipes` lists them. Every field of its config is a flag.

    `logdepth train --resume RUN` goes on with a run that was stopped or killed.
    """

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE", help_behavior_hint="(required)")] = (
        "pydocs-ar-grc"
    )
    """Which run of `logdepth recipes` to make."""
    run: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    """The config of the run."""
    resume: Path | None = None
    """Folder of a run to go on with; it needs no recipe, and its config is the one saved with it."""
    out: Path | None = None
    """Folder of the run; by default runs/RECIPE-SEED."""
    config: Path | None = None
    """JSON file with fields to change: a sweep's best.json, a run's config.json, or your own; flags come after it."""
    data_dir: Path | None = None
    """The folder above those of the corpora; by default $LOGDEPTH_DATA."""
    json: Switch = False
    """Print how the run ended as JSON."""


@dataclass(frozen=True, kw_only=True)
class ResumeCommand:
    """Go on with a run, with the config that is saved with it."""

    resume: Path
    """Folder of the run."""
    data_dir: Path | None = None
    """The folder above those of the corpora; by default $LOGDEPTH_DATA."""
    json: Switch = False
    """Print how the run ended as JSON."""


def run(arguments: Sequence[str]) -> int:
    if any(argument.split("=")[0] == "--resume" for argument in arguments):
        return _resume(arguments)
    name, file = named_first(arguments, RECIPES), value_of("--config", arguments)
    changes = {} if file is None else changes_in(Path(file))
    if name is None and isinstance(changes.get("recipe"), str):  # a sweep's best.json
        name = changes["recipe"]
    if name is None and "config" in changes:
        config = from_dict(RunConfig, changes["config"], str(file))
        if value_of("--out", arguments) is None:
            raise UserError("where to? a run from a config.json needs --out")
    elif name is None and not {"-h", "--help"} & set(arguments):
        raise UserError("which recipe? `logdepth recipes` lists them; or --resume RUN to go on with a run")
    else:
        config = changed(recipe(name or "pydocs-ar-grc"), changes, str(file))
    config = counting_epochs(config, arguments)
    command = parse(TrainCommand, arguments, "train", TrainCommand(recipe=name or "", run=config))
    if command.recipe != (name or ""):  # a value of a flag looked like a recipe
        raise UserError(f"which recipe, '{name}' or '{command.recipe}'? put it before the flags")
    out = command.out or Path("runs") / f"{name}-{command.run.seed}"
    return _finish(out, command.json, lambda: train(command.run, out, command.data_dir))


def changed(config: RunConfig, changes: dict[str, Any], file: str) -> RunConfig:
    """A recipe with the changes of a file, which may be that of a run or a sweep but not of another kind of model."""
    if "config" in changes:
        of_recipe = changes.get("recipe")
        if of_recipe in RECIPES and type(recipe(of_recipe).model) is not type(config.model):
            raise UserError(f"{file} is for the recipe '{of_recipe}', another kind of model than this recipe's")
        if of_recipe in RECIPES and recipe(of_recipe).data.corpus != config.data.corpus:
            print(f"{file} is for '{of_recipe}': what suits that corpus is used for another here", file=sys.stderr)
        changes = changes["config"]
    train = changes.get("train")
    if isinstance(train, dict) and "epochs" in train and "max_steps" not in train:
        config = _without_steps(config)
    after = override(config, changes, file)
    if type(after.model) is not type(config.model):
        kinds = f"{type(after.model).__name__}, not {type(config.model).__name__}"
        raise UserError(f"{file} is for a {kinds} as this recipe has; leave out the recipe to train it as it is")
    return after


def counting_epochs(config: RunConfig, arguments: Sequence[str]) -> RunConfig:
    """Where epochs are asked for, or searched, and no number of steps, they count: a recipe's steps would win."""
    names = {argument.split("=")[0].replace("_", "-").removeprefix("--") for argument in arguments}
    return _without_steps(config) if "train.epochs" in names and "train.max-steps" not in names else config


def _without_steps(config: RunConfig) -> RunConfig:
    return replace(config, train=replace(config.train, max_steps=None))


def _resume(arguments: Sequence[str]) -> int:
    name = named_first(arguments, RECIPES)
    if name is not None:
        raise UserError(f"--resume goes on with a run's own recipe; leave out '{name}'")
    try:
        command = parse(ResumeCommand, arguments, "train")
    except UserError as error:
        if re.search(r"unrecognized options: --(train|model|data|seed)\b", str(error)):
            raise UserError(
                "a run goes on with the config that it began with; for another, start a new run, "
                "with --train.init-from to begin with its weights"
            ) from None
        raise
    return _finish(command.resume, command.json, lambda: resume(command.resume, command.data_dir))


def _finish(out: Path, as_json: bool, work: Callable[[], TrainState]) -> int:
    try:
        state = work()
    except Interrupted as stopped:
        print(f"{stopped}; saved. Go on with: logdepth train --resume {out}", file=sys.stderr)
        return stopped.exit_code
    if as_json:
        print_json({"run": str(out)} | asdict(state))
    else:
        print(f"{out}: {state.finished} after {state.step:,} steps and {in_words(state.seconds)}")
        print(f"best validation loss {state.best_loss:.4f} at step {state.best_step:,}")
        print(f"next: logdepth evaluate {out}   or   logdepth generate {out}")
    return 0
