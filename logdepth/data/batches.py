"""Training batches: windows of consecutive tokens. The seed and the step fully determine a batch."""

import functools
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from logdepth.data.store import TokenStore
from logdepth.errors import UserError

Window = NDArray[np.int64]


class Batches:
    """Shuffled windows of `context` tokens. An epoch visits each window at most once; `at` returns any step's batch.

    Windows start at multiples of `context`. With `shifted`, each epoch adds a random offset below `context` to all
    starts.
    """

    def __init__(self, store: TokenStore, *, batch_size: int, context: int, seed: int, shifted: bool = False) -> None:
        self.store, self.batch_size, self.context, self.seed = store, batch_size, context, seed
        self.num_shifts = context if shifted else 1
        self.steps_per_epoch = (len(store) - self.num_shifts) // context // batch_size
        if self.steps_per_epoch < 1:
            info = store.info
            raise UserError(
                f"the {info.split} split of '{info.corpus}' has {info.tokens:,} tokens, fewer than one batch of "
                f"{batch_size} × {context} + {self.num_shifts}; lower --train.batch-size or --train.context"
            )
        self.windows = sliding_window_view(store.tokens, context + 1)  # a view: reads no tokens

    def at(self, step: int) -> Window:
        """Return the batch of a step, `[batch_size, context + 1]`: the inputs and, shifted by one, their targets."""
        epoch, number = divmod(step, self.steps_per_epoch)
        windows = self.windows[_shift(self.num_shifts, self.seed, epoch) :: self.context]
        order = _order(len(windows), self.seed, epoch)
        chosen = order[number * self.batch_size : (number + 1) * self.batch_size]
        return windows[chosen].astype(np.int64)


def document_bounds(inputs: NDArray[np.int64], separator: int) -> Sequence[int]:
    """Return cu_seqlens of the flattened windows `[batch, length]`. Documents end at separators and at row ends."""
    ends = inputs == separator
    ends[:, -1] = True
    return [0, *(np.flatnonzero(ends) + 1).tolist()]


@functools.lru_cache(maxsize=2)
def _order(num_windows: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(num_windows)


@functools.lru_cache(maxsize=2)
def _shift(num_shifts: int, seed: int, epoch: int) -> int:
    return int(np.random.default_rng([seed, epoch, 1]).integers(num_shifts))
