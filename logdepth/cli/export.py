"""`logdepth export`: write a run as a Hugging Face model, and such a model as a run."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from logdepth.cli.parsing import parse
from logdepth.errors import UserError
from logdepth.runs import Weights


@dataclass(frozen=True, kw_only=True)
class ExportCommand:
    """Write a run as a model for Hugging Face, or such a model as a run. Weights stay the same, bit by bit."""

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|DIR")]
    """Folder of the run; with --to run, folder of the model."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR|RUN")]
    """Folder to write, which must not exist."""
    to: Literal["hf", "run"]
    """What to write: a folder that transformers loads, with or without logdepth (hf), or a run of logdepth (run)."""
    weights: Weights = "best"
    """Weights to export: those with the lowest validation loss (best) or those of the latest checkpoint (last)."""


def run(arguments: Sequence[str]) -> int:
    command = parse(ExportCommand, arguments, "export")
    try:
        from logdepth.hf.export import export_run, import_run
    except ModuleNotFoundError as error:
        raise UserError(f"export needs {error.name}; install it with: pip install 'logdepth[hf]'") from None
    if command.to == "hf":
        export_run(command.source, command.out, command.weights)
    else:
        import_run(command.source, command.out)
    print(f"{command.out} is written", file=sys.stderr)
    return 0
