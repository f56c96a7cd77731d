"""`logdepth generate`: generate text with a run."""

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
from logdepth.ops.precision import Precision
from logdepth.runs import PRETRAINED, RunFolder, Weights, device_named

MAX_TEXTS = 100_000
"""Number of texts that are generated as one batch at most."""


@dataclass(frozen=True, kw_only=True)
class GenerateCommand:
    """Generate continuations of prompts. One prompt is streamed; several prompts are generated as one batch."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = PRETRAINED
    """Folder of the run; by default the small model that comes with the library."""
    prompt: tuple[str, ...] = ("",)
    """One or more prompts; - reads a prompt from stdin. By default the prompt is empty, which starts a new document."""
    samples: int = 1
    """Number of continuations per prompt."""
    sampling: Annotated[SamplingConfig, tyro.conf.arg(name="")] = field(default_factory=SamplingConfig)
    """How the next token is sampled."""
    weights: Weights = "best"
    """Weights to load: those with the lowest validation loss (best) or those of the latest checkpoint (last)."""
    device: str = "auto"
    """Device, such as cpu or cuda:0; auto selects a GPU if one is available."""
    precision: Precision = "auto"
    """Precision of the arithmetic; auto is bfloat16 on CUDA and float32 elsewhere."""
    accelerate: bool = True
    """Use kernels and CUDA graphs on a GPU."""
    json: Switch = False
    """Print prompts and continuations as JSON when all are complete."""


def run(arguments: Sequence[str]) -> int:
    command = parse(GenerateCommand, arguments, "generate")
    if command.samples < 1:
        raise UserError(f"--samples must be at least 1; got {command.samples}")
    if command.samples * len(command.prompt) > MAX_TEXTS:
        raise UserError(f"--samples and --prompt ask for more than {MAX_TEXTS:,} texts at once; ask for fewer")
    given = [_read_stdin() if one == "-" else one for one in command.prompt]
    prompts = [one for one in given for _ in range(command.samples)]
    loaded = RunFolder(command.run).load(command.weights, device_named(command.device, "--device"))
    if command.run == PRETRAINED:
        print("no RUN is given: this is the small model that comes with the library", file=sys.stderr)
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
            sys.stdout.write(prompts[0])  # not before the first piece, so that warnings precede it
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


def _read_stdin() -> str:
    if sys.stdin is None:
        raise UserError("--prompt - reads the prompt from stdin, which is closed; give it as --prompt TEXT")
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise UserError(f"--prompt -: stdin is not text in {error.encoding.upper()}; convert it") from None
