"""`logdepth evaluate`: perplexity of a run."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from logdepth.acceleration import acceleration_in_words
from logdepth.cli.output import print_json, print_table
from logdepth.cli.parsing import Switch, parse
from logdepth.data import CORPORA, TokenStore, prepare_other
from logdepth.errors import UserError, did_you_mean
from logdepth.evaluate import PAPER_CONTEXTS, evaluate
from logdepth.progress import Progress
from logdepth.runs import LoadedRun, Precision, RunFolder, Weights, device_named
from logdepth.training import prepared_for

UNKNOWN_TO_MENTION = 1e-3


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Token perplexity, word perplexity and bits per byte of a run, in windows of any context length."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Folder of the run."""
    split: Literal["train", "valid", "test"] = "test"
    """Which text."""
    contexts: tuple[int, ...] = ()
    """Tokens in a window, one or more; by default the length that the run was trained at."""
    grid: Switch = False
    """The paper's lengths: 32, 160, …, 2,976."""
    stride: int | None = None
    """Tokens from window to window; by default windows do not overlap. Only tokens that are new in a window count."""
    positions: Switch = False
    """Also the loss at each position of a window; with --json."""
    corpus: str | None = None
    """Another corpus than the run's own, in the run's tokens."""
    paths: tuple[Path, ...] = ()
    """Files or folders of other text, in the run's tokens."""
    weights: Weights = "best"
    """Those of the lowest validation loss, or of the last checkpoint."""
    device: str = "auto"
    """cpu, cuda, …; auto: a GPU if there is one."""
    precision: Precision = "auto"
    """Of the arithmetic; auto: bfloat16 on CUDA, float32 elsewhere."""
    accelerate: bool = True
    """Use kernels and CUDA graphs on a GPU."""
    data_dir: Path | None = None
    """The folder above those of the corpora; by default $LOGDEPTH_DATA."""
    json: Switch = False
    """Print the results as JSON."""


def run(arguments: Sequence[str]) -> int:
    command = parse(EvaluateCommand, arguments, "evaluate")
    if command.positions and not command.json:
        raise UserError("--positions is for --json: a table would be too long")
    folder = RunFolder(command.run)
    train = folder.config().train
    contexts = PAPER_CONTEXTS if command.grid else command.contexts or (train.context,)
    for context in contexts:
        if context < 1:
            raise UserError(f"--contexts must be at least 1; got {context}")
        if command.stride is not None and not 1 <= command.stride <= context:
            raise UserError(f"--stride must be from 1 to the context; got {command.stride} and {context}")
    device = device_named(command.device, "--device")
    loaded = folder.load(command.weights, device)
    store = _store(command, loaded)
    if device.type == "cuda":
        print(acceleration_in_words(loaded.model, command.accelerate), file=sys.stderr)
    for context in contexts:
        if context >= len(store):
            print(f"context {context:,}: the text is shorter; it is one window of {len(store) - 1:,}", file=sys.stderr)
    results = []
    with Progress(f"evaluating {command.run}", len(contexts) * (len(store) - 1), unit="tokens") as progress:
        for number, context in enumerate(contexts):
            before = number * (len(store) - 1)
            result = evaluate(
                loaded.model,
                store,
                context=context,
                stride=command.stride,
                precision=command.precision,
                reset_at_documents=train.reset_at_documents,
                accelerate=command.accelerate,
                on_progress=lambda done, before=before, context=context: progress.update(  # type: ignore[misc]
                    before + done, f"context {context:,}"
                ),
            )
            results.append(result)
    if command.json:
        facts = {"run": str(command.run), "weights": command.weights, "step": loaded.step, "device": str(device)}
        print_json(facts | {"results": [result.as_dict(command.positions) for result in results]})
        return 0
    info = store.info
    ends = "one stream" if info.separator is None else f"documents that end with a token: {info.documents:,}"
    print(f"{info.corpus}, {info.split}: {info.bytes:,} bytes, {results[0].words:,} words with line ends, {ends}")
    if info.unknown > UNKNOWN_TO_MENTION * info.tokens:
        share = 100 * info.unknown / info.tokens
        print(f"{share:.2g} % of the tokens are unknown to the tokenizer: lost text, which flatters words and bytes")
    heads = ("context", "stride", "token perplexity", "word perplexity", "bits per byte")
    rows = [
        (one.context, one.stride, one.token_perplexity, one.word_perplexity, f"{one.bits_per_byte:.4f}")
        for one in results
    ]
    print_table(heads, rows)
    return 0


def _store(command: EvaluateCommand, loaded: LoadedRun) -> TokenStore:
    if command.corpus is None and not command.paths:
        return prepared_for(RunFolder(command.run), command.data_dir).stores[command.split]
    name = command.corpus or "text"
    if name not in CORPORA:
        raise UserError(f"there is no corpus '{name}'{did_you_mean(name, CORPORA)}")
    prepared = prepare_other(loaded.config.data, loaded.tokenizer, name, command.paths, command.data_dir)
    return prepared.stores[command.split]
