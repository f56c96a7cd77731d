"""`logdepth export`: write a run as a model for Hugging Face or ONNX Runtime, and a model for Hugging Face as a run."""

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
    """Write a run as a model for Hugging Face or ONNX Runtime, or a model for Hugging Face as a run.

    Weights stay the same, bit by bit.
    """

    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|DIR")]
    """Folder of the run; with --to run, folder of the model."""
    out: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="DIR|RUN")]
    """Folder to write, which must not exist."""
    to: Literal["hf", "onnx", "run"]
    """What to write: a folder that transformers loads, with or without logdepth (hf); the step of one token, its state
    and the tokenizer for ONNX Runtime (onnx); or a run of logdepth (run)."""
    weights: Weights = "best"
    """Weights to export: those with the lowest validation loss (best) or those of the latest checkpoint (last)."""
    batch: int = 1
    """With --to onnx: number of rows of a step."""
    max_length: int = 4096
    """With --to onnx: number of tokens that a row may read. Full attention has memory for all of them."""

    def __post_init__(self) -> None:
        if self.batch < 1 or self.max_length < 1:
            raise ValueError(f"batch and max_length must be at least 1; got {self.batch} and {self.max_length}")
        if self.to != "onnx" and (self.batch, self.max_length) != (1, 4096):
            raise ValueError("batch and max_length are for --to onnx")


def run(arguments: Sequence[str]) -> int:
    command = parse(ExportCommand, arguments, "export")
    extra = "onnx" if command.to == "onnx" else "hf"
    try:
        if command.to == "onnx":
            from logdepth import onnx

            onnx.export_run(
                command.source, command.out, command.weights, batch=command.batch, max_length=command.max_length
            )
        else:
            from logdepth.hf.export import export_run, import_run

            if command.to == "hf":
                export_run(command.source, command.out, command.weights)
            else:
                import_run(command.source, command.out)
    except ModuleNotFoundError as error:
        raise UserError(f"export needs {error.name}; install it with: pip install 'logdepth[{extra}]'") from None
    print(f"{command.out} is written", file=sys.stderr)
    return 0
