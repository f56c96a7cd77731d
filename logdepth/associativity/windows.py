"""Windows of text on which operators are compared: whole ones, side by side, spread evenly over a split."""

import itertools

import numpy as np
import torch
from torch import Tensor

from logdepth.data import TokenStore
from logdepth.errors import UserError


def spread_windows(store: TokenStore, context: int, count: int, *, within_documents: bool = False) -> Tensor:
    """`[windows, context]` tokens: `count` windows, or as many as there are, in the order of the text.

    Args:
        within_documents: no window holds the end of a document before its own, for models that start anew there.
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
            f"{where} has {len(starts)} windows of {context:,} tokens to compare, and two are the least; "
            "choose a shorter --context"
        )
    chosen = np.linspace(0, len(starts) - 1, min(count, len(starts))).round().astype(int)
    return torch.from_numpy(np.stack([store.window(start, context) for start in starts[chosen]]))
