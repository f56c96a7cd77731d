"""`logdepth generate`: text from a run."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from logdepth.acceleration import acceleration_in_words
from logdepth.cli.output import print_json
from logdepth.cli.parsing import Switch, parse
from logdepth.data import CORPORA
from logdepth.errors import UserError
from logdepth.generate import SamplingConfig, generate
from logdepth.runs import Precision, RunFolder, Weights, device_named


@dataclass(frozen=True, kw_only=True)
class GenerateCommand:
    """Text that goes on from a prompt, streamed. Several prompts are gone on with together."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    prompt: tuple[str, ...] = ("",)
    """One text or more; without any a new document is started. A lone - is read from stdin."""
    samples: int = 1
    """Texts for each prompt."""
    sampling: Annotated[SamplingConfig, tyro.conf.arg(name="")] = field(default_factory=SamplingConfig)
    """How the next token is chosen."""
    weights: Weights = "best"
    """Those of the lowest validation loss, or of the last checkpoint."""
    device: str = "auto"
    """cpu, cuda, …; auto: a GPU if there is one."""
    precision: Precision = "auto"
    """Of the arithmetic; auto: bfloat16 on CUDA, float32 elsewhere."""
    accelerate: bool = True
    """Use kernels and CUDA graphs on a GPU."""
    json: Switch = False
    """Print prompts and texts as JSON, at the end."""


def run(arguments: Sequence[str]) -> int:
    command = parse(GenerateCommand, arguments, "generate")
    if command.samples < 1:
        raise UserError(f"--samples must be at least 1; got {command.samples}")
    given = [sys.stdin.read() if one == "-" else one for one in command.prompt]
    prompts = [one for one in given for _ in range(command.samples)]
    loaded = RunFolder(command.run).load(command.weights, device_named(command.device, "--device"))
    if next(loaded.model.parameters()).is_cuda:
        print(acceleration_in_words(loaded.model, command.accelerate), file=sys.stderr)
    pieces = generate(
        loaded.model,
        loaded.tokenizer,
        prompts,
        command.sampling,
        separated=CORPORA[loaded.config.data.corpus].separated,
        precision=command.precision,
        accelerate=command.accelerate,
        on_warning=lambda line: print(line, file=sys.stderr),
    )
    live = len(prompts) == 1 and not command.json
    texts = [""] * len(prompts)
    for number, piece in enumerate(pieces):
        if live and not number:
            sys.stdout.write(prompts[0])  # with the first piece: what there is to say comes before
        texts[piece.row] += piece.text
        if live:
            sys.stdout.write(piece.text)
            sys.stdout.flush()
    if live:
        print()
    elif command.json:
        print_json([{"prompt": one, "text": text} for one, text in zip(prompts, texts, strict=True)])
    else:
        print("\n---\n".join(one + text for one, text in zip(prompts, texts, strict=True)))
    return 0
