"""`logdepth train`: a recipe, with any field changed; or a run that goes on."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from logdepth.atomic import read_json
from logdepth.cli.output import print_json
from logdepth.cli.parsing import Switch, first_word, parse, value_of
from logdepth.config import override
from logdepth.errors import UserError
from logdepth.progress import in_words
from logdepth.recipes import recipe
from logdepth.runs import RunConfig
from logdepth.train import Interrupted, Standing, resume, train


@dataclass(frozen=True, kw_only=True)
class TrainCommand:
    """Train a recipe; `logdepth recipes` lists them. Every field of its config is a flag.

    `logdepth train --resume RUN` goes on with a run that was stopped or killed.
    """

    recipe: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE")] = "pydocs-ar-grc"
    """Which run of `logdepth recipes` to make."""
    run: Annotated[RunConfig, tyro.conf.arg(name="")] = field(default_factory=RunConfig)
    """The config of the run."""
    out: Path | None = None
    """Folder of the run; by default runs/RECIPE-SEED."""
    config: Path | None = None
    """JSON file with fields to change, nested as in a run's config.json; flags come after it."""
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
    if value_of("--resume", arguments) is not None:
        again = parse(ResumeCommand, arguments, "train")
        return _finish(again.resume, again.json, lambda: resume(again.resume, again.data_dir))
    name = first_word(arguments)
    if name is None and not {"-h", "--help"} & set(arguments):
        raise UserError("which recipe? `logdepth recipes` lists them; or --resume RUN to go on with a run")
    name = name or "pydocs-ar-grc"
    config = recipe(name)
    file = value_of("--config", arguments)
    if file is not None:
        changes = read_json(Path(file))
        if isinstance(changes, dict) and "config" in changes:  # the config.json of a run
            changes = changes["config"]
        config = override(config, changes, file)
    command = parse(TrainCommand, arguments, "train", TrainCommand(recipe=name, run=config))
    out = command.out or Path("runs") / f"{name}-{command.run.seed}"
    return _finish(out, command.json, lambda: train(command.run, out, command.data_dir))


def _finish(out: Path, as_json: bool, work: Callable[[], Standing]) -> int:
    try:
        standing = work()
    except Interrupted as stopped:
        print(f"{stopped}; saved. Go on with: logdepth train --resume {out}", file=sys.stderr)
        return 128 + stopped.signal_number
    if as_json:
        print_json({"run": str(out)} | asdict(standing))
    else:
        print(f"{out}: {standing.finished} after {standing.step:,} steps and {in_words(standing.seconds)}")
        print(f"best validation loss {standing.best_loss:.4f} at step {standing.best_step:,}")
        print(f"next: logdepth evaluate {out}   or   logdepth generate {out}")
    return 0
