"""Windows of text on which operators are compared: non-overlapping, and spread evenly over a split."""

import itertools

import numpy as np
import torch
from torch import Tensor

from logdepth.data import TokenStore
from logdepth.errors import UserError


def spread_windows(store: TokenStore, context: int, count: int, *, within_documents: bool = False) -> Tensor:
    """Return tokens `[windows, context]`: up to `count` windows, in the order of the text.

    Args:
        store: the split.
        context: tokens per window.
        count: maximum number of windows.
        within_documents: choose only windows that do not span documents, for models that reset at document boundaries.
    """
    bounds = np.array([0, len(store)])
    if within_documents and store.info.separator is not None:
        bounds = np.unique([0, *(np.flatnonzero(store.tokens == store.info.separator) + 1), len(store)])
    starts = np.concatenate(
        [np.arange(first, last - context + 1, context) for first, last in itertools.pairwise(bounds)]
    )
    if len(starts) < 2:
        where = f"the {store.info.split} split of '{store.info.corpus}'"
        raise UserError(
            f"{where} has {len(starts)} windows of {context:,} tokens, but a comparison needs at least two; "
            "choose a shorter --context"
        )
    chosen = np.linspace(0, len(starts) - 1, min(count, len(starts))).round().astype(int)
    return torch.from_numpy(np.stack([store.window(start, context) for start in starts[chosen]]))
