"""Snapshots of states, which share their blocks, and a cache of them by the tokens that were read.

A snapshot of n tokens holds O(log n + window) bytes. Two snapshots of one sequence have the larger blocks of their
trees in common, so a later one takes them from an earlier one. A fork is the same object once more.
"""

import hashlib
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from logdepth.models import LMState
from logdepth.scanning import TreeState
from logdepth.scanning.lengths import Lengths


class _Blocks(NamedTuple):
    """The blocks of one sequence's TreeState, each a tensor of its own."""

    kind: type[TreeState]
    length: int
    tables: tuple[tuple[Tensor, ...], ...]
    """For each table of the state, its rows: those of the largest blocks first."""
    nothing: Tensor
    """A table without rows."""

    @classmethod
    def of(cls, state: TreeState, earlier: "_Blocks | None") -> "_Blocks":
        length = int(state.row_lengths.array()[0])
        shared = 0 if earlier is None else num_shared_blocks(earlier.length, length)
        tables = []
        for number, name in enumerate(state.tables):
            before = () if earlier is None else earlier.tables[number][:shared]
            table: Tensor = getattr(state, name)
            own = (table[row : row + 1].clone() for row in range(shared, len(table)))
            tables.append((*before, *own))
        nothing = state.blocks.new_empty(0, state.width)
        return cls(type(state), length, tuple(tables), nothing)

    def state(self) -> TreeState:
        tables = [torch.cat([self.nothing, *rows]) for rows in self.tables]
        return self.kind(Lengths(1, self.length, None), *tables)


class Snapshot:
    """The state after a sequence of tokens, and what the head reads there. It is never changed."""

    def __init__(self, length: int, blocks: tuple[Any, ...], features: Tensor | None) -> None:
        """Use `Snapshot.of` instead."""
        self.length, self._blocks = length, blocks
        self.features = features
        """What the head reads after the last token, `[dim]`; None where it is not known."""

    @classmethod
    def of(cls, state: LMState, features: Tensor | None = None, *, earlier: Self | None = None) -> Self:
        """The snapshot of a state of one sequence.

        Args:
            state: of one row.
            features: what the head reads after its last token, `[dim]`.
            earlier: a snapshot of the same sequence, with which the new one shares blocks.
        """
        before = (None,) * len(state.blocks) if earlier is None else earlier._blocks
        blocks = tuple(_frozen(one, another) for one, another in zip(state.blocks, before, strict=True))
        return cls(int(state.lengths[0]), blocks, None if features is None else features.clone())

    def state(self) -> LMState:
        """The state, to be continued."""
        return LMState(tuple(_thawed(one) for one in self._blocks), torch.tensor([self.length]))

    def tensors(self) -> Iterator[Tensor]:
        """All tensors, each once; snapshots that share a block have the same tensor."""
        if self.features is not None:
            yield self.features
        for one in self._blocks:
            yield from _tensors(one)

    @property
    def nbytes(self) -> int:
        """Bytes of the snapshot alone."""
        return sum(one.untyped_storage().nbytes() for one in self.tensors())


def num_shared_blocks(earlier: int, later: int) -> int:
    """How many of the largest blocks of a sequence of `later` tokens were there after `earlier` of them."""
    same = ~(earlier ^ later)
    depth = max(earlier, later).bit_length()
    shared = 0
    for level in reversed(range(depth)):
        if not same >> level & 1:
            break
        shared += later >> level & 1
    return shared


def _frozen(part: Any, earlier: Any) -> Any:
    """A part of a state whose blocks are tensors of their own, or those of the same part of an earlier state."""
    if isinstance(part, TreeState):
        return _Blocks.of(part, earlier)
    if isinstance(part, Tensor):
        # What a tensor does not use of its storage would stay in memory with it.
        return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()
    if part is None:
        return None
    before = (None,) * len(part) if earlier is None else earlier
    return _like(part, [_frozen(one, another) for one, another in zip(part, before, strict=True)])


def _thawed(part: Any) -> Any:
    if isinstance(part, _Blocks):
        return part.state()
    if part is None or isinstance(part, Tensor):
        return part
    return _like(part, [_thawed(one) for one in part])


def _tensors(part: Any) -> Iterator[Tensor]:
    if isinstance(part, Tensor):
        yield part
    elif isinstance(part, _Blocks):
        for rows in part.tables:
            yield from rows
    elif part is not None:
        for one in part:
            yield from _tensors(one)


def _like(part: tuple[Any, ...], items: Sequence[Any]) -> Any:
    """A tuple of the same kind: states are tuples of tensors, of trees and of each other."""
    return type(part)(*items) if hasattr(part, "_fields") else tuple(items)


class Holdings:
    """The tensors that some snapshots hold, each counted once."""

    def __init__(self) -> None:
        self._holders: Counter[int] = Counter()
        self.nbytes = 0

    def add(self, snapshot: Snapshot) -> None:
        for one in snapshot.tensors():
            if not self._holders[id(one)]:
                self.nbytes += one.untyped_storage().nbytes()
            self._holders[id(one)] += 1

    def remove(self, snapshot: Snapshot) -> None:
        for one in snapshot.tensors():
            self._holders[id(one)] -= 1
            if not self._holders[id(one)]:
                self.nbytes -= one.untyped_storage().nbytes()
                del self._holders[id(one)]


class Prefix:
    """A sequence of tokens whose prefixes can be looked up; the hashes are computed once."""

    def __init__(self, tokens: Sequence[int] | NDArray[np.int32], spacing: int) -> None:
        self.tokens, self.spacing = np.asarray(tokens, dtype=np.int32), spacing
        self._hashes = [b""]

    def key(self, length: int) -> tuple[bytes, bytes]:
        """What stands for the first `length` tokens: a hash of all whole stretches, and the tokens after them."""
        whole, rest = divmod(length, self.spacing)
        while len(self._hashes) <= whole:
            start = (len(self._hashes) - 1) * self.spacing
            stretch = self.tokens[start : start + self.spacing].tobytes()
            self._hashes.append(hashlib.sha256(self._hashes[-1] + stretch).digest())
        return self._hashes[whole], self.tokens[length - rest : length].tobytes()


class PrefixCache:
    """Snapshots by the tokens that lead to them. Those that were used longest ago give way to new ones."""

    def __init__(self, max_bytes: int, spacing: int) -> None:
        """
        Args:
            max_bytes: the snapshots together take at most this much.
            spacing: tokens between the lengths at which snapshots are looked for first.
        """
        self.max_bytes, self.spacing = max_bytes, spacing
        self._snapshots: OrderedDict[tuple[bytes, bytes], Snapshot] = OrderedDict()
        self._rests: dict[bytes, Counter[int]] = {}
        """For each hash, the lengths of the rests that follow it, and how many of each length there are."""
        self._holdings = Holdings()

    def __len__(self) -> int:
        return len(self._snapshots)

    @property
    def nbytes(self) -> int:
        return self._holdings.nbytes

    def find(self, prefix: Prefix) -> Snapshot | None:
        """The snapshot of the longest prefix there is, from which to continue.

        That of the whole sequence is of use only if it says what the head reads.
        """
        length = len(prefix.tokens)
        for whole in reversed(range(length // self.spacing + 1)):
            start = whole * self.spacing
            rests = self._rests.get(prefix.key(start)[0], Counter())
            for rest in sorted(rests, reverse=True):
                if start + rest > length:
                    continue
                key = prefix.key(start + rest)
                found = self._snapshots.get(key)
                if found is not None and (start + rest < length or found.features is not None):
                    self._snapshots.move_to_end(key)
                    return found
        return None

    def add(self, prefix: Prefix, snapshot: Snapshot) -> None:
        """Keep the snapshot of the first tokens of a sequence, as many as it has read."""
        key = prefix.key(snapshot.length)
        before = self._snapshots.get(key)
        if before is not None:
            self._snapshots.move_to_end(key)
            if before.features is not None or snapshot.features is None:
                return
            self._remove(key)
        self._snapshots[key] = snapshot
        self._rests.setdefault(key[0], Counter())[snapshot.length % self.spacing] += 1
        self._holdings.add(snapshot)
        while self.nbytes > self.max_bytes and self._snapshots:
            self._remove(next(iter(self._snapshots)))

    def clear(self) -> None:
        for key in list(self._snapshots):
            self._remove(key)

    def lengths(self) -> list[int]:
        """The lengths of all snapshots, those used longest ago first."""
        return [one.length for one in self._snapshots.values()]

    def _remove(self, key: tuple[bytes, bytes]) -> None:
        snapshot = self._snapshots.pop(key)
        self._holdings.remove(snapshot)
        rests = self._rests[key[0]]
        rests[snapshot.length % self.spacing] -= 1
        if not rests[snapshot.length % self.spacing]:
            del rests[snapshot.length % self.spacing]
        if not rests:
            del self._rests[key[0]]
