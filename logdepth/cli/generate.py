"""`logdepth generate`: text from a run."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from logdepth.cli.output import print_json
from logdepth.cli.parsing import Switch, parse
from logdepth.data import CORPORA
from logdepth.generate import SamplingConfig, generate
from logdepth.runs import Precision, RunFolder, Weights, device_named


@dataclass(frozen=True, kw_only=True)
class GenerateCommand:
    """Text that goes on from a prompt, streamed. Several prompts are gone on with together."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    prompt: tuple[str, ...] = ("",)
    """One text or more; none starts a new document."""
    sampling: Annotated[SamplingConfig, tyro.conf.arg(name="")] = field(default_factory=SamplingConfig)
    """How the next token is chosen."""
    weights: Weights = "best"
    """Those of the lowest validation loss, or of the last checkpoint."""
    device: str = "auto"
    """cpu, cuda, …; auto: a GPU if there is one."""
    precision: Precision = "auto"
    """Of the arithmetic; auto: bfloat16 on CUDA, float32 elsewhere."""
    json: Switch = False
    """Print prompts and texts as JSON, at the end."""


def run(arguments: Sequence[str]) -> int:
    command = parse(GenerateCommand, arguments, "generate")
    loaded = RunFolder(command.run).load(command.weights, device_named(command.device))
    pieces = generate(
        loaded.model,
        loaded.tokenizer,
        command.prompt,
        command.sampling,
        separated=CORPORA[loaded.config.data.corpus].separated,
        precision=command.precision,
    )
    live = len(command.prompt) == 1 and not command.json
    texts = [""] * len(command.prompt)
    if live:
        sys.stdout.write(command.prompt[0])
    for piece in pieces:
        texts[piece.row] += piece.text
        if live:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    if live:
        print()
    elif command.json:
        print_json([{"prompt": one, "text": text} for one, text in zip(command.prompt, texts, strict=True)])
    else:
        print("\n---\n".join(one + text for one, text in zip(command.prompt, texts, strict=True)))
    return 0
