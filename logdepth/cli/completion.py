"""`logdepth completion`: a script that completes verbs, recipes and flags in a shell."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union

import tyro

from logdepth.cli.check import CheckCommand
from logdepth.cli.evaluate import EvaluateCommand
from logdepth.cli.generate import GenerateCommand
from logdepth.cli.parsing import parse
from logdepth.cli.prepare import PrepareCommand
from logdepth.cli.recipes import RecipesCommand
from logdepth.cli.time import TimeCommand
from logdepth.cli.train import TrainCommand
from logdepth.recipes import RECIPES

RecipeName: Any = Literal[tuple(RECIPES)]


@dataclass(frozen=True, kw_only=True)
class CompletionCommand:
    """Print a completion script; for bash: `logdepth completion bash >> ~/.bash_completion`."""

    shell: Annotated[Literal["bash", "zsh", "tcsh", "fish"], tyro.conf.Positional] = "bash"
    """The shell that it is for."""


@dataclass(frozen=True, kw_only=True)
class _TrainCommand(TrainCommand):
    """With the recipes' names, to complete them."""

    recipe: Annotated[RecipeName, tyro.conf.Positional] = "pydocs-ar-grc"


COMMANDS: dict[str, Any] = {
    "prepare": PrepareCommand,
    "train": _TrainCommand,
    "evaluate": EvaluateCommand,
    "time": TimeCommand,
    "generate": GenerateCommand,
    "recipes": RecipesCommand,
    "check": CheckCommand,
    "completion": CompletionCommand,
}


def run(arguments: Sequence[str]) -> int:
    command = parse(CompletionCommand, arguments, "completion")
    verbs = tuple(Annotated[one, tyro.conf.subcommand(name)] for name, one in COMMANDS.items())
    every_verb: Any = Union[verbs]  # noqa: UP007
    try:
        tyro.cli(
            every_verb,
            prog="logdepth",
            args=["--tyro-print-completion", command.shell],
            config=(tyro.conf.AvoidSubcommands,),
        )
    except SystemExit as stopped:
        return int(stopped.code or 0)
    return 0
