"""`logdepth completion`: print a script for shell completion of verbs, recipes and flags."""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

import tyro

from logdepth.cli.associativity import AssociativityCommand
from logdepth.cli.check import CheckCommand
from logdepth.cli.corpora import CorporaCommand
from logdepth.cli.evaluate import EvaluateCommand
from logdepth.cli.export import ExportCommand
from logdepth.cli.generate import GenerateCommand
from logdepth.cli.parsing import parse
from logdepth.cli.prepare import PrepareCommand
from logdepth.cli.recipes import RecipesCommand
from logdepth.cli.report import ReportCommand
from logdepth.cli.reproduce import ReproduceCommand
from logdepth.cli.sweep import SweepCommand
from logdepth.cli.tasks import TasksCommand
from logdepth.cli.time import TimeCommand
from logdepth.cli.train import TrainCommand
from logdepth.recipes import RECIPES

_Recipes: Any = Union[  # noqa: UP007
    tuple(
        Annotated[TrainCommand, tyro.conf.subcommand(name, default=TrainCommand(recipe=name, run=make()))]
        for name, make in RECIPES.items()
    )
]


@dataclass(frozen=True, kw_only=True)
class CompletionCommand:
    """Print a completion script; for bash: `logdepth completion bash >> ~/.bash_completion`."""

    shell: Annotated[Literal["bash", "zsh", "tcsh", "fish"], tyro.conf.Positional] = "bash"
    """The shell to print the script for."""


@dataclass(frozen=True, kw_only=True)
class _Train:
    """Train a recipe. For completion, each recipe is a subcommand with the flags of its model."""

    recipe: Annotated[_Recipes, tyro.conf.arg(name="")]


COMMANDS: dict[str, Any] = {
    "reproduce": ReproduceCommand,
    "report": ReportCommand,
    "prepare": PrepareCommand,
    "train": _Train,
    "sweep": SweepCommand,
    "evaluate": EvaluateCommand,
    "time": TimeCommand,
    "associativity": AssociativityCommand,
    "generate": GenerateCommand,
    "export": ExportCommand,
    "corpora": CorporaCommand,
    "tasks": TasksCommand,
    "recipes": RecipesCommand,
    "check": CheckCommand,
    "completion": CompletionCommand,
}


def run(arguments: Sequence[str]) -> int:
    command = parse(CompletionCommand, arguments, "completion")
    verbs = tuple(Annotated[one, tyro.conf.subcommand(name)] for name, one in COMMANDS.items())
    every_verb: Any = Union[verbs]  # noqa: UP007
    script = io.StringIO()
    with contextlib.redirect_stdout(script), contextlib.suppress(SystemExit):
        tyro.cli(
            every_verb,
            prog="logdepth",
            args=["--tyro-print-completion", command.shell],
            config=(tyro.conf.AvoidSubcommands, tyro.conf.OmitSubcommandPrefixes),
        )
    # In bash, complete file names if nothing else matches.
    print(script.getvalue().replace("complete -F", "complete -o default -F"))
    return 0
