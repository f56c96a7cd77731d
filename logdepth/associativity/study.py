"""The study of one model: its distances compared with those of untrained models, and its perplexity with each tree."""

import itertools
from collections.abc import Sequence

import numpy as np
import torch

from logdepth.associativity.outcome import SCAN, Associativity, InParts
from logdepth.associativity.trees import PrefixesOf, WithTree, left_fold, scanned, shifted
from logdepth.associativity.triples import Distance, distances, num_groups
from logdepth.associativity.windows import spread_windows
from logdepth.data import TokenStore
from logdepth.errors import UserError
from logdepth.evaluate import BATCH_TOKENS, evaluate
from logdepth.models import LM
from logdepth.ops.precision import Precision
from logdepth.progress import Progress
from logdepth.shapes import Tokens

DEFAULT_OFFSETS = (1, 2, 4, 8, 16, 32)
"""Default offsets; those below the context are used. 1 moves all blocks, 2 all except the pairs, and so on."""
PARTS = 16
"""Maximum number of parts into which the text is divided to estimate standard errors."""


def study(
    model: LM,
    store: TokenStore,
    *,
    context: int,
    offsets: Sequence[int] = (),
    num_windows: int = 64,
    num_seeds: int = 3,
    precision: Precision = "auto",
    reset_at_documents: bool = False,
) -> Associativity:
    """Measure distances and perplexities of a model on one split.

    Args:
        model: the trained model.
        store: the split.
        context: tokens per window, for triples and perplexities.
        offsets: numbers of leaves by which the tree is shifted; by default `DEFAULT_OFFSETS`.
        num_windows: number of windows from which triples are taken.
        num_seeds: number of untrained models to compare with.
        precision: precision of the perplexities. Distances are measured in the precision of the weights.
        reset_at_documents: reset the state at document boundaries, for models that were trained with that option.
    """
    longest = longest_context(model)
    if not 3 <= context <= longest:
        raise UserError(
            f"the context must be from 3, for three blocks, to {longest:,}, the maximum for one forward pass; "
            f"got {context:,}"
        )
    windows = spread_windows(store, context, num_windows, within_documents=reset_at_documents)
    trained, untrained = _all_distances(model, windows, num_seeds)
    offsets = offsets or [one for one in DEFAULT_OFFSETS if one < context]
    trees: dict[str, PrefixesOf] = {SCAN: scanned, "left fold": left_fold}
    trees |= {f"offset {offset}": shifted(offset) for offset in offsets}
    return Associativity(
        context=context,
        num_windows=len(windows),
        distances=trained,
        untrained=untrained,
        trees=_evaluated(model, store, trees, context, precision, reset_at_documents),
    )


def longest_context(model: LM) -> int:
    """Return the longest window that `evaluate` processes in one forward pass, without continuing from a state."""
    del model
    return BATCH_TOKENS


def _all_distances(model: LM, windows: Tokens, num_seeds: int) -> tuple[list[Distance], list[list[Distance]]]:
    groups = num_groups(len(windows))
    found: list[list[Distance]] = []
    with Progress("distances", (1 + num_seeds) * groups, unit="groups of windows") as progress:
        for number in range(1 + num_seeds):
            which = f"untrained, seed {number - 1}" if number else "trained"
            one = _untrained(model, number - 1) if number else model
            found.append(
                distances(
                    one.eval(),
                    windows,
                    batch_tokens=longest_context(model),
                    on_group=lambda which=which: progress.update(progress.done + 1, which),  # type: ignore[misc]
                )
            )
    return found[0], found[1:]


def _untrained(model: LM, seed: int) -> LM:
    """Return the model's initialisation for a training seed."""
    weight = model.embedding.weight
    with torch.random.fork_rng(devices=[]):  # preserve the caller's random state
        torch.manual_seed(seed)
        return LM(model.vocab_size, model.config).to(weight.device, weight.dtype)


def parts_of(store: TokenStore, context: int) -> list[TokenStore]:
    """Divide a split of at least one window into up to `PARTS` parts at window boundaries.

    The windows of the parts are those of the whole split. Like windows, consecutive parts share one token.
    """
    inputs = len(store) - 1
    cuts = np.linspace(0, inputs // context, min(PARTS, inputs // context) + 1).round().astype(int)[:-1] * context
    return [
        TokenStore(store.tokens[first : last + 1], store.info) for first, last in itertools.pairwise([*cuts, inputs])
    ]


def _evaluated(
    model: LM,
    store: TokenStore,
    trees: dict[str, PrefixesOf],
    context: int,
    precision: Precision,
    reset_at_documents: bool,
) -> dict[str, InParts]:
    parts = parts_of(store, context)
    found: dict[str, InParts] = {}
    with Progress("other trees", len(trees) * (len(store) - 1), unit="tokens") as progress:
        for name, tree in trees.items():
            note = f"{name}: sequential merges" if tree is left_fold else name
            found[name] = InParts(
                [
                    evaluate(
                        WithTree(model, tree),
                        part,
                        context=context,
                        precision=precision,
                        reset_at_documents=reset_at_documents,
                        on_progress=lambda done, before=progress.done, note=note: progress.update(  # type: ignore[misc]
                            before + done, note
                        ),
                    )
                    for part in parts
                ]
            )
    return found
