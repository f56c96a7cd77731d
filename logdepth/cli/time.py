"""`logdepth time`: measure a model's speed by context length."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro

from logdepth.acceleration import acceleration_in_words, compile_model
from logdepth.cli.output import print_json, print_table
from logdepth.cli.parsing import Switch, parse, refuse_both, with_separate_contexts
from logdepth.errors import UserError
from logdepth.evaluate import PAPER_CONTEXTS
from logdepth.models import LanguageModel
from logdepth.ops.precision import Precision
from logdepth.progress import Progress
from logdepth.recipes import RECIPES, recipe
from logdepth.runs import RunFolder, device_named
from logdepth.runs.environment import environment, typed_command
from logdepth.timing import Timing, What, time_model


@dataclass(frozen=True, kw_only=True)
class TimeCommand:
    """Measure milliseconds per batch and tokens per second by context length: medians after warm-up, with quartiles."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE|RUN")]
    """Recipe, whose model is timed untrained, or folder of a run."""
    contexts: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    """Context lengths in tokens, separated by spaces or commas."""
    grid: Switch = False
    """Time at the paper's context lengths: 32, 160, …, 2,976."""
    batch_size: int | None = None
    """Sequences per batch at every length; by default --batch-tokens determines it."""
    batch_tokens: int = 16_384
    """Tokens per batch, if --batch-size is not given."""
    what: What = "forward"
    """What to time: the forward pass, or the forward and backward passes."""
    repeats: int = 10
    """Number of timed batches per length."""
    warmups: int = 3
    """Number of untimed warm-up batches per length."""
    compile: Switch = False
    """Use torch.compile, as in training."""
    accelerate: bool = True
    """Use kernels and CUDA graphs on a GPU, as in training."""
    device: str = "auto"
    """Device, such as cpu or cuda:0; auto selects a GPU if one is available."""
    precision: Precision = "auto"
    """Precision of the arithmetic; auto is bfloat16 on CUDA and float32 elsewhere."""
    json: Switch = False
    """Print the results as JSON."""


def run(arguments: Sequence[str]) -> int:
    command = parse(TimeCommand, with_separate_contexts(arguments), "time")
    refuse_both("--grid", "--contexts", arguments)
    contexts = PAPER_CONTEXTS if command.grid else command.contexts
    for flag, value, least in (
        ("--contexts", min(contexts, default=0), 1),
        ("--batch-size", command.batch_size, 1),
        ("--batch-tokens", command.batch_tokens, 1),
        ("--repeats", command.repeats, 1),
        ("--warmups", command.warmups, 0),
    ):
        if value is not None and value < least:
            raise UserError(f"{flag} must be at least {least}; got {value}")
    device = device_named(command.device, "--device")
    model = _model(command.model, device)
    if device.type == "cuda":
        print(acceleration_in_words(model, command.accelerate), file=sys.stderr)
    if command.compile:
        compile_model(model)
    timings: list[Timing] = []
    with Progress(f"timing {command.model}", len(contexts), unit="lengths") as progress:
        for timing in time_model(
            model,
            contexts,
            batch_size=command.batch_size,
            batch_tokens=command.batch_tokens,
            what=command.what,
            precision=command.precision,
            accelerate=command.accelerate,
            repeats=command.repeats,
            warmups=command.warmups,
        ):
            timings.append(timing)
            progress.update(len(timings), f"context {timing.context:,}")
    if command.json:
        facts = {
            "model": command.model,
            "what": command.what,
            "environment": environment(device),
            "command": typed_command(),
        }
        print_json(facts | {"timings": [timing.as_dict() for timing in timings]})
        return 0
    attention = f"; attention: {timings[0].attention}" if timings[0].attention else ""
    print(f"{command.model}, {command.what}, {environment(device)['device']}{attention}")
    heads = ("context", "batch", "ms per batch", "lower quartile", "upper quartile", "tokens/s")
    rows = [
        (one.context, one.batch_size, one.milliseconds, one.lower_quartile, one.upper_quartile, int(speed))
        for one in timings
        if (speed := one.tokens_per_second)
    ]
    print_table(heads, rows)
    return 0


def _model(name: str, device: torch.device) -> LanguageModel:
    if name in RECIPES:
        config = recipe(name)
        return config.model.build(config.data.tokenizer.vocab_size).to(device)
    folder = RunFolder(Path(name))
    if folder.exists:
        return folder.load("last", device).model
    recipe(name)
    raise AssertionError("unreachable: recipe refuses unknown names")
