"""`logdepth sweep`: search a recipe's hyperparameters. Several processes can work on the same study."""

import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from logdepth.cli.output import print_json
from logdepth.cli.parsing import Switch, named_first, parse, value_of
from logdepth.cli.train import changed, counting_epochs
from logdepth.errors import UserError
from logdepth.recipes import RECIPES, changes_in, recipe
from logdepth.runs import MACHINE_FIELDS, RunConfig
from logdepth.training import Interrupted

NO_COMPLETE_TRIAL = 3
"""Exit code if all trials have ended and none completed."""


@dataclass(frozen=True, kw_only=True)
class SweepCommand:
    """Search a recipe's hyperparameters for the lowest validation loss. Every field of its config is a flag.

    To add a worker or to resume a sweep, run the same command again: the trials of killed workers are resumed. When a
    trial ends, its metrics are kept, and its weights and checkpoint are removed.
    """

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE", help_behavior_hint="(required)")] = (
        "pydocs-ar-grc"
    )
    """Recipe to search; `logdepth recipes` lists them."""
    run: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    """Config of all trials, except for the searched fields."""
    trials: int = 20
    """Number of trials in the study, over all workers."""
    space: tuple[str, ...] = ()
    """Search space: NAME=LOW:HIGH, NAME=LOW:HIGH:log, NAME=LOW:HIGH:STEP or NAME=ONE,ANOTHER. NAME is a field such as
    train.learning_rate, several fields joined by +, or dropout for all dropouts of the model except those inside
    model.blocks. By default the fields that the paper searches, with our ranges: train.learning_rate=5e-5:5e-3:log
    train.weight_decay=1e-6:0.3:log dropout=0:0.4:0.05."""
    storage: str | None = None
    """Database URL, such as postgresql+psycopg2://USER@HOST/NAME or sqlite:///FILE, for workers on several machines; by
    default a journal file in the folder of the sweep."""
    study: str | None = None
    """Name of the study in the storage; by default the name of the recipe."""
    out: Path | None = None
    """Folder of the sweep; by default sweeps/STUDY."""
    prune: bool = True
    """End trials early whose loss is worse than the median of other trials at the same fraction of the schedule."""
    grace: float = 60.0
    """Seconds without a heartbeat after which the trial of a worker on another machine is taken over."""
    wait: bool = True
    """Wait until the trials of other workers have ended, and take over those of dead workers."""
    config: Path | None = None
    """JSON file with fields to change, or a run's config.json. Flags override it."""
    data_dir: Path | None = None
    """Root data directory; by default $LOGDEPTH_DATA."""
    json: Switch = False
    """Print the outcome as JSON."""


def run(arguments: Sequence[str]) -> int:
    name, file = named_first(arguments, RECIPES), value_of("--config", arguments)
    if not name and not {"-h", "--help"} & set(arguments):
        raise UserError("RECIPE is missing; `logdepth recipes` lists the recipes")
    config = recipe(name or "pydocs-ar-grc")
    if file is not None:
        config = changed(config, changes_in(Path(file)), file)
    config = counting_epochs(config, arguments)
    command = parse(SweepCommand, arguments, "sweep", SweepCommand(recipe=name or "", run=config))
    if not name or command.recipe != name:  # a value of a flag looked like a recipe
        raise UserError(f"found two recipes, '{name}' and '{command.recipe}'; put the recipe before the flags")
    return _search(name, command, _machine_flags(arguments))


def _machine_flags(arguments: Sequence[str]) -> list[str]:
    """Return the flags that `logdepth train` needs in addition to best.json."""
    names = {"data-dir", *(name.replace("_", "-") for name in MACHINE_FIELDS - {"data.paths"})}
    kept: list[str] = []
    keeping = False
    for argument in arguments:
        if argument.startswith("--"):
            keeping = argument.removeprefix("--").partition("=")[0].replace(".no-", ".") in names
        if keeping:
            kept.append(argument)
    return kept


def _search(name: str, command: SweepCommand, flags: list[str]) -> int:
    try:
        import optuna as _  # noqa: F401
    except ImportError:
        raise UserError("sweeps need optuna; install it with pip install '.[sweep]'") from None
    from logdepth.sweep import Search, default_specs, parse_space, without_password, work

    if command.storage is not None:  # the command is recorded with every trial
        shown = without_password(command.storage)
        sys.argv = [argument.replace(command.storage, shown) for argument in sys.argv]
    study = command.study or name
    search = Search(
        recipe=name,
        config=command.run,
        space=parse_space(command.space or default_specs(command.run), command.run),
        trials=command.trials,
        out=command.out or Path("sweeps") / study,
        study=study,
        storage=command.storage,
        prune=command.prune,
        grace=command.grace,
        wait=command.wait,
        data_dir=command.data_dir,
    )
    try:
        record = work(search)
    except Interrupted as stopped:
        name_of_signal = signal.Signals(stopped.signal_number or signal.SIGTERM).name
        print(f"stopped by {name_of_signal}; saved. Run the same command again to continue.", file=sys.stderr)
        return stopped.exit_code
    if command.json:
        print_json(record)
    else:
        _print(search.out, record, flags)
    return 0 if record["best"] is not None else NO_COMPLETE_TRIAL


def _print(out: Path, record: dict[str, Any], flags: list[str]) -> None:
    counts = {state: sum(row["state"] == state for row in record["trials"]) for state in ("complete", "pruned")}
    print(f"{out}: {counts['complete']} trials complete, {counts['pruned']} pruned")
    best = record["best"]
    if best is None:
        print("no trial completed, so there is no best one; search lower learning rates, or use --no-prune")
        return
    print(f"best validation loss {best['loss']:.4f}, trial {best['trial']}:")
    for name, value in best["params"].items():
        print(f"  {name} {value:.4g}" if isinstance(value, float) else f"  {name} {value}")
    folder = Path("runs") / out.name  # the recipe's default folder may already exist
    again = shlex.join(["logdepth", "train", "--config", str(out / "best.json"), "--out", str(folder), *flags])
    print(f"next: {again}")
