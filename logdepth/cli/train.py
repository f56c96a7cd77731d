"""`logdepth train`: trains a recipe with any field changed, or resumes a run."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from logdepth.atomic import NoSpaceError
from logdepth.cli.output import print_json
from logdepth.cli.parsing import Switch, named_first, parse, value_of
from logdepth.config import from_dict, override
from logdepth.errors import UserError
from logdepth.progress import in_words
from logdepth.recipes import RECIPES, changes_in, recipe
from logdepth.runs import RunConfig, RunFolder
from logdepth.runs.folder import quoted
from logdepth.training import Interrupted, TrainState, resume, train


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a recipe; `logdepth recipes` lists them. Every field of its config is a flag.

    `logdepth train --resume RUN` resumes a run that was stopped or killed, or extends a finished one with a higher
    --train.max-steps. `logdepth train --train.init-from RUN` starts a new run from the weights of another, with its
    config.
    """

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE", help_behavior_hint="(required)")] = (
        "pydocs-ar-grc"
    )
    """Name of the recipe to train."""
    run: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    """The config of the run."""
    resume: Path | None = None
    """Folder of a run to resume, with its own recipe and config."""
    out: Path | None = None
    """Folder of the new run. By default, runs/RECIPE-SEED, or runs/from-RUN-SEED without a recipe."""
    config: Path | None = None
    """JSON file with fields to change: best.json of a sweep, config.json of a run, or your own. Flags override it."""
    data_dir: Path | None = None
    """Root data directory, which holds a folder per corpus. By default, $LOGDEPTH_DATA."""
    json: Switch = False
    """Print the final state of the run as JSON."""


@dataclass(frozen=True, kw_only=True)
class ResumeCommand:
    """Resume a run. Its config stays as it is, except for how long it trains (--train.max-steps, --train.epochs,
    --train.patience) and for the machine (--train.device and so on)."""

    resume: Path
    """Folder of the run to resume."""
    run: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    """The config of the run."""
    data_dir: Path | None = None
    """Root data directory, which holds a folder per corpus. By default, $LOGDEPTH_DATA."""
    json: Switch = False
    """Print the final state of the run as JSON."""


def run(arguments: Sequence[str]) -> int:
    if any(argument.split("=")[0] == "--resume" for argument in arguments):
        return _resume(arguments)
    name, file = named_first(arguments, RECIPES), value_of("--config", arguments)
    if name == "":  # as from an unset variable of a shell
        raise UserError("RECIPE is empty; `logdepth recipes` lists the recipes")
    first = value_of("--train.init-from", arguments)
    changes = {} if file is None else changes_in(Path(file))
    if name is None and isinstance(changes.get("recipe"), str):  # a sweep's best.json
        name = changes["recipe"]
    if name is None and "config" in changes:
        config = from_dict(RunConfig, changes["config"], str(file))
        if value_of("--out", arguments) is None:
            raise UserError("--out is missing: a run from a config.json needs --out")
    elif name is None and first is not None:
        config = changed(RunFolder(first).config(), changes, str(file))
    elif name is None and not {"-h", "--help"} & set(arguments):
        raise UserError("which recipe? `logdepth recipes` lists them; --resume RUN resumes a run")
    else:
        config = changed(recipe(name or "pydocs-ar-grc"), changes, str(file))
    config = counting_epochs(config, arguments)
    command = parse(TrainCommand, arguments, "train", TrainCommand(recipe=name or "", run=config))
    if command.recipe != (name or ""):  # the value of a flag looked like a recipe
        raise UserError(f"which recipe, '{name}' or '{command.recipe}'? put it before the flags")
    if name is None and first is not None:
        _refuse_other_tokenizer(command.run, first)
    named = name or f"from-{Path(str(first)).resolve().name}"
    out = command.out or Path("runs") / f"{named}-{command.run.seed}"
    return _finish(out, command.json, lambda: train(command.run, out, command.data_dir))


def _refuse_other_tokenizer(config: RunConfig, first: str) -> None:
    """Raise a UserError if settings of the tokenizer are not those of the run `first`: they would have no effect."""
    if config.data.tokenizer != RunFolder(first).config().data.tokenizer:
        raise UserError(f"--train.init-from uses the tokenizer of {first}; leave out other settings of data.tokenizer")


def changed(config: RunConfig, changes: dict[str, Any], file: str) -> RunConfig:
    """The recipe with the changes of a file, which may come from a run or a sweep of the same kind of model."""
    if "config" in changes:
        of_recipe = changes.get("recipe")
        if of_recipe in RECIPES and type(recipe(of_recipe).model) is not type(config.model):
            raise UserError(f"{file} is for the recipe '{of_recipe}', another kind of model than this recipe's")
        if of_recipe in RECIPES and recipe(of_recipe).data.corpus != config.data.corpus:
            print(f"{file} is for '{of_recipe}': here its settings are used for another corpus", file=sys.stderr)
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
    """Without the recipe's max_steps if the flags set epochs only: max_steps would override them."""
    names = {argument.split("=")[0].replace("_", "-").removeprefix("--") for argument in arguments}
    return _without_steps(config) if "train.epochs" in names and "train.max-steps" not in names else config


def _without_steps(config: RunConfig) -> RunConfig:
    return replace(config, train=replace(config.train, max_steps=None))


def _resume(arguments: Sequence[str]) -> int:
    name = named_first(arguments, RECIPES)
    if name is not None:
        raise UserError(f"--resume uses the recipe of the run; leave out '{name}'")
    out = value_of("--resume", arguments)
    config = RunConfig() if out is None else counting_epochs(RunFolder(out).config(), arguments)
    command = parse(ResumeCommand, arguments, "train", ResumeCommand(resume=Path(out or ""), run=config))
    return _finish(command.resume, command.json, lambda: resume(command.resume, command.data_dir, config=command.run))


def _finish(out: Path, as_json: bool, work: Callable[[], TrainState]) -> int:
    try:
        state = work()
    except NoSpaceError as error:
        if RunFolder(out).exists:  # the same command would be refused
            resumed = f"resume with: logdepth train --resume {quoted(out)}"
            raise NoSpaceError(error.path, error.reason, resumed) from None
        raise
    except Interrupted as stopped:
        print(f"{stopped}; saved. Resume with: logdepth train --resume {quoted(out)}", file=sys.stderr)
        return stopped.exit_code
    if as_json:
        print_json({"run": str(out)} | asdict(state))
    else:
        print(f"{out}: {state.finished} after {state.step:,} steps and {in_words(state.seconds)}")
        print(f"best validation loss {state.best_loss:.4f} at step {state.best_step:,}")
        print(f"next: logdepth evaluate {quoted(out)}   or   logdepth generate {quoted(out)}")
    return 0
