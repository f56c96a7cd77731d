"""Pieces: the new tokens of every document, cut where its chunks end, so that pieces can be computed in parallel.

Chunks are counted from a document's first token. A call may start and end in the middle of a chunk, so a piece is the
part of a chunk that one call brings; pieces are padded to one size.
"""

from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from logdepth.blocks.layout import Layout
from logdepth.ops.block_reading import ReadIndex
from logdepth.ops.dispatch import outside_compiled_graphs
from logdepth.scanning.arguments import refuse_traced_sizes
from logdepth.scanning.device_index import index_on
from logdepth.scanning.lengths import Ints, Lengths
from logdepth.scanning.plan_cache import PLANS
from logdepth.scanning.read_index import read_index


class Pieces(NamedTuple):
    """Which tokens are in which piece, from lengths only. Tensors are index lists on the device of the tokens."""

    size: int
    """Tokens that a piece has room for."""
    tokens: Tensor | None
    """The token in each place of each piece, `[pieces · size]`, with the number of tokens for a place without one;
    None: pieces are the tokens as they are."""
    places: Tensor | None
    """The place of each token, likewise."""
    row: Ints
    """The row of each piece; the pieces of a row are in order and follow each other."""
    number: Ints
    """How many pieces of its row come before each piece."""
    rows: Tensor
    """The rows that have pieces."""
    first: Tensor
    """The first piece of each of these rows."""
    last: Tensor
    """The last piece of each of these rows."""
    later: Tensor
    """All other pieces than the first ones."""
    complete: Tensor
    """The pieces that end where their chunks end."""
    num_complete: Ints
    """The number of these in each row."""
    open_rows: Tensor
    """The rows whose last piece ends before its chunk does."""
    open: Tensor
    """These last pieces."""
    nbytes: int

    @property
    def bounds(self) -> Ints:
        """Where the pieces of each row start, and last their number: cu_seqlens of pieces."""
        return np.searchsorted(self.row, np.arange(len(self.num_complete) + 1))

    def cut(self, tokens: Tensor) -> Tensor:
        """Tokens `[tokens, …]` as pieces `[pieces, size, …]`, with zeros where there is none."""
        return _taken(tokens, self.tokens).view(len(self.row), self.size, *tokens.shape[1:])

    def joined(self, pieces: Tensor) -> Tensor:
        """Pieces as tokens again, with zeros for tokens that are padding."""
        return _taken(pieces.flatten(0, 1), self.places)


@outside_compiled_graphs
def pieces_of(layout: Layout, chunk: int, opened: Ints, device: torch.device) -> Pieces:
    """The pieces of the layout's new tokens; `opened` are the tokens of each row's open chunk before them."""
    refuse_traced_sizes(layout.shape)
    key = ("pieces", chunk, Lengths.of(opened).key, Lengths.of(layout.new).key, layout.shape, layout.packed, device)
    return PLANS.get(key, device, partial(_pieces_of, layout, chunk, opened, device))


@outside_compiled_graphs
def prefix_index(pieces: Pieces, device: torch.device) -> ReadIndex:
    """Every piece but the first of its row reads the prefix of the pieces before it, which has the number before."""

    def build() -> ReadIndex:
        later = np.flatnonzero(pieces.number)
        count = len(pieces.row)
        return read_index(device, later, np.zeros_like(later), later - 1, num_readers=count, num_blocks=count)

    return PLANS.get(("prefixes", pieces.row.tobytes(), device), device, build)


def _pieces_of(layout: Layout, chunk: int, opened: Ints, device: torch.device) -> Pieces:
    new, num_tokens = layout.new, layout.shape.numel()
    start = layout.cu_seqlens[:-1] if layout.cu_seqlens is not None else np.arange(len(new)) * layout.shape[1]
    count = np.where(new > 0, -(-(opened + new) // chunk), 0)
    row = np.repeat(np.arange(len(new)), count)
    end_of_row = np.cumsum(count)
    number = np.arange(len(row)) - (end_of_row - count)[row]
    begin = np.maximum(number * chunk - opened[row], 0)
    length = np.minimum((number + 1) * chunk - opened[row], new[row]) - begin
    size = int(length.max(initial=1))

    column = np.arange(size)
    there = column < length[:, None]
    tokens = np.where(there, (start[row] + begin)[:, None] + column, num_tokens).ravel()
    places = np.full(num_tokens, tokens.size)
    places[tokens[there.ravel()]] = np.flatnonzero(there)
    as_they_are = np.array_equal(tokens, np.arange(num_tokens))

    is_complete = (opened + new)[row] >= (number + 1) * chunk
    rows = np.flatnonzero(count)
    last = end_of_row[rows] - 1
    lists = [
        *([] if as_they_are else [tokens, places]),
        rows,
        (end_of_row - count)[rows],
        last,
        np.flatnonzero(number),
        np.flatnonzero(is_complete),
        rows[~is_complete[last]],
        last[~is_complete[last]],
    ]
    *cut, rows_on, first, last_on, later, complete, open_rows, open_pieces = (index_on(device, one) for one in lists)
    return Pieces(
        size=size,
        tokens=None if as_they_are else cut[0],
        places=None if as_they_are else cut[1],
        row=row,
        number=number,
        rows=rows_on,
        first=first,
        last=last_on,
        later=later,
        complete=complete,
        num_complete=(opened + new) // chunk,
        open_rows=open_rows,
        open=open_pieces,
        nbytes=sum(one.nbytes for one in (*lists, row, number)),
    )


def _taken(entries: Tensor, index: Tensor | None) -> Tensor:
    """The given entries, with zeros for the one after the last."""
    if index is None:
        return entries
    return torch.cat([entries, entries.new_zeros(1, *entries.shape[1:])]).index_select(0, index)
