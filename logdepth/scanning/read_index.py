"""Who reads which block as lists for kernels, from the reads alone (numpy; tensors only as lists)."""

import numpy as np
import torch

from logdepth.ops.block_reading import ReadIndex
from logdepth.scanning.device_index import index_on
from logdepth.scanning.lengths import Ints

MAX_SHARE = 16
"""Reads of a block that one program sums up: a block of a long sequence has hundreds."""


def read_index(
    device: torch.device, reader: Ints, level: Ints, block: Ints, *, num_readers: int, num_blocks: int
) -> ReadIndex:
    """Return the lists for these reads, in any order, of blocks numbered by their rows in a table."""
    order = np.lexsort((level, reader))
    reader, level, block = reader[order], level[order], block[order]
    entry = np.lexsort((reader, block))
    count = np.bincount(block, minlength=num_blocks)
    shares = np.maximum(-(-count // MAX_SHARE), 1)

    # A share for each block and each MAX_SHARE of its reads; the largest first, so that none is waited for.
    of_block = np.repeat(np.arange(num_blocks), shares)
    number = np.arange(len(of_block)) - np.repeat(np.cumsum(shares) - shares, shares)
    length = np.minimum(count[of_block] - number * MAX_SHARE, MAX_SHARE)
    first = (np.cumsum(count) - count)[of_block] + number * MAX_SHARE
    is_partial = shares[of_block] > 1
    target = np.where(is_partial, num_blocks + np.cumsum(is_partial) - 1, of_block)
    largest_first = np.argsort(-length, kind="stable")
    lengths = length[largest_first]
    listed = np.repeat(first[largest_first] - np.cumsum(lengths) + lengths, lengths) + np.arange(len(entry))
    entry = entry[listed]
    summed = np.flatnonzero(shares > 1)
    lists = {
        "first": np.searchsorted(reader, np.arange(num_readers + 1)),
        "block": block,
        "level": level,
        "entry": entry,
        "reader": reader[entry],
        "start": np.concatenate([[0], lengths.cumsum()]),
        "target": target[largest_first],
        "summed": summed,
        "sum_start": np.concatenate([[0], shares[summed].cumsum()]),
    }
    tensors = {name: index_on(device, np.ascontiguousarray(one, dtype=np.int32)) for name, one in lists.items()}
    nbytes = sum(one.nbytes for one in tensors.values())
    return ReadIndex(**tensors, num_partial=int(is_partial.sum()), nbytes=nbytes)
