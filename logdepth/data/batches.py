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
    """The batches of one rank. Every epoch visits each window of `context` tokens at most once, in a new order.

    The batch of a step is a function of the arguments and the step, so any step can be replayed. Each rank takes an
    equal, contiguous share of every batch; the shares of all ranks, in order, are the batch of a single rank.

    Args:
        batch_size: windows per step, over all ranks together.
        context: tokens per window.
        shifted: whether windows start at a random offset, drawn for each epoch, from the multiples of `context`; by
            default they start at these multiples.
        rank: which share this process takes, from 0 to `world_size` - 1.
        world_size: the number of processes that train together.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        batch_size: int,
        context: int,
        seed: int,
        shifted: bool = False,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank must be from 0 to below world_size; got {rank} of {world_size}")
        if batch_size % world_size:
            raise UserError(f"--train.batch-size {batch_size} is not a multiple of {world_size}, the number of ranks")
        self.store, self.batch_size, self.context, self.seed = store, batch_size, context, seed
        self.share = batch_size // world_size
        """Windows per step on this rank."""
        self.first = rank * self.share
        """Where this rank's share starts in the batch."""
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
        """This rank's share of a step's batch, `[share, context + 1]`: the targets are the inputs shifted by one."""
        epoch, number = divmod(step, self.steps_per_epoch)
        windows = self.windows[_shift(self.num_shifts, self.seed, epoch) :: self.context]
        order = _order(len(windows), self.seed, epoch)
        start = number * self.batch_size + self.first
        chosen = order[start : start + self.share]
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
