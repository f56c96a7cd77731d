"""`logdepth evaluate`: measure the perplexity of a run."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from logdepth.acceleration import acceleration_in_words
from logdepth.cli.output import print_json, print_table
from logdepth.cli.parsing import Switch, parse, refuse_both, with_separate_contexts
from logdepth.data import CORPORA, TokenStore, prepare_other
from logdepth.errors import UserError, did_you_mean
from logdepth.evaluate import PAPER_CONTEXTS, evaluate
from logdepth.ops.precision import Precision
from logdepth.parallel import joined
from logdepth.progress import Progress
from logdepth.runs import PRETRAINED, LoadedRun, RunFolder, Weights
from logdepth.training import prepared_for

UNKNOWN_TO_MENTION = 1e-3


@dataclass(frozen=True, kw_only=True)
class EvaluateCommand:
    """Measure token perplexity, word perplexity and bits per byte of a run in windows of any context length."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = PRETRAINED
    """Folder of the run; by default the small model that comes with the library."""
    split: Literal["train", "valid", "test"] | None = None
    """Split to evaluate on; by default test, and all of the text that --paths names."""
    contexts: tuple[int, ...] = ()
    """Context lengths in tokens per window, separated by spaces or commas; by default the training length."""
    grid: Switch = False
    """Evaluate at the paper's context lengths: 32, 160, …, 2,976."""
    stride: int | None = None
    """Tokens from the start of one window to the next; by default the context length, so that windows do not overlap.
    Only tokens that are new in a window are counted."""
    positions: Switch = False
    """Also report the loss at each position of a window. Requires --json."""
    corpus: str | None = None
    """Another corpus to evaluate on, tokenized with the run's tokenizer; by default the run's own corpus."""
    paths: tuple[Path, ...] = ()
    """Files or folders of other text to evaluate on, tokenized with the run's tokenizer: all of it, unless --split
    is given."""
    weights: Weights = "best"
    """Weights to load: those with the lowest validation loss (best) or those of the latest checkpoint (last)."""
    device: str = "auto"
    """Device, such as cpu or cuda:0; auto selects a GPU if one is available."""
    precision: Precision = "auto"
    """Precision of the arithmetic; auto is bfloat16 on CUDA and float32 elsewhere."""
    accelerate: bool = True
    """Use kernels and CUDA graphs on a GPU."""
    data_dir: Path | None = None
    """Root data directory; by default $LOGDEPTH_DATA."""
    json: Switch = False
    """Print the results as JSON."""


def run(arguments: Sequence[str]) -> int:
    command = parse(EvaluateCommand, with_separate_contexts(arguments), "evaluate")
    refuse_both("--grid", "--contexts", arguments)
    if command.positions and not command.json:
        raise UserError("--positions requires --json, because a table would be too long")
    folder = RunFolder(command.run)
    train = folder.config().train
    contexts = PAPER_CONTEXTS if command.grid else command.contexts or (train.context,)
    for context in contexts:
        if context < 1:
            raise UserError(f"--contexts must be at least 1; got {context}")
        if command.stride is not None and not 1 <= command.stride <= context:
            raise UserError(f"--stride must be from 1 to the context; got {command.stride} and {context}")
    ranks = joined()
    device = ranks.device(command.device, "--device")
    loaded = folder.load(command.weights, device)
    store = ranks.machines_first(lambda: _store(command, loaded))
    store.refuse_if_nothing_to_predict()
    if device.type == "cuda":
        print(acceleration_in_words(loaded.model, command.accelerate), file=sys.stderr)
    for context in contexts:
        if context >= len(store):
            shorter = f"the text is shorter, so it is evaluated as one window of {len(store) - 1:,} tokens"
            print(f"context {context:,}: {shorter}", file=sys.stderr)
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
                ranks=ranks,
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
    part = "all of it" if info.split == "all" else info.split
    documents = f"{info.documents:,} document{'s' if info.documents != 1 else ''}"
    ends = "one stream" if info.separator is None else f"{documents} with end-of-document tokens"
    print(f"{info.corpus}, {part}: {info.bytes:,} bytes, {results[0].words:,} words with line ends, {ends}")
    if info.unknown > UNKNOWN_TO_MENTION * info.tokens:
        share = 100 * info.unknown / info.tokens
        print(
            f"{share:.2g} % of the tokens are unknown to the tokenizer; their text is lost, which lowers word "
            "perplexity and bits per byte"
        )
    heads = ("context", "stride", "token perplexity", "word perplexity", "bits per byte")
    rows = [
        (one.context, one.stride, one.token_perplexity, one.word_perplexity, f"{one.bits_per_byte:.4f}")
        for one in results
    ]
    print_table(heads, rows)
    return 0


def _store(command: EvaluateCommand, loaded: LoadedRun) -> TokenStore:
    if command.corpus is None and not command.paths:
        return prepared_for(RunFolder(command.run), command.data_dir).stores[command.split or "test"]
    name = command.corpus or "text"
    if name not in CORPORA:
        raise UserError(f"there is no corpus '{name}'{did_you_mean(name, CORPORA)}")
    whole = name == "text" and command.split is None
    prepared = prepare_other(loaded.config.data, loaded.tokenizer, name, command.paths, command.data_dir, whole=whole)
    split = command.split or "test"
    if not whole and not prepared.stores[split].info.bytes:
        why = CORPORA[name](command.data_dir, command.paths).why_empty(split)
        also = "; or leave out --split to measure all of it" if name == "text" else ""
        raise UserError(f"corpus '{name}': its {split} split is empty: {why}{also}")
    return prepared.stores["all" if whole else split]
