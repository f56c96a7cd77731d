"""Slots: sequences of any lengths that join and leave a Decoder between its steps.

A Decoder has memory for a fixed number of rows, the slots. A sequence is written into an empty slot and the slot is
cleared when it leaves, so that the others stay where they are and recorded steps remain valid. Only when there are too
few slots, or far too many, are all states copied to other memory.
"""

import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from logdepth.decoding.decoder import Decoder
from logdepth.models import LM, LMState, unallocated

Member = TypeVar("Member")


class Slots(Generic[Member]):
    """The sequences that are decoded together, each known by an object of the caller."""

    members: list[Member]
    """The members now, in the order in which `step` takes their tokens and returns their logits."""

    def __init__(
        self, model: LM, *, graphs: bool | None = None, on_warning: Callable[[str], None] = warnings.warn
    ) -> None:
        """The arguments are those of a Decoder."""
        self.model, self.graphs, self.on_warning = model, graphs, on_warning
        self._decoder: Decoder | None = None
        self._slots: list[Member | None] = []
        self._arrange()

    @property
    def nbytes(self) -> int:
        """Bytes of the memory of all slots on the device."""
        return 0 if self._decoder is None else self._decoder.nbytes

    @property
    def count(self) -> int:
        """The number of slots, empty or not."""
        return len(self._slots)

    def join(self, members: Sequence[Member], states: LMState, *, coming: int = 0) -> None:
        """Let sequences join.

        Args:
            members: objects that differ from each other and from those that are here.
            states: the state of each.
            coming: how many more will join soon: if memory must grow, it grows for them as well.
        """
        if not members:
            return
        empty = [slot for slot, member in enumerate(self._slots) if member is None]
        if len(empty) < len(members):
            self._resize(num_slots(len(self.members) + len(members) + coming), states)
            empty = [slot for slot, member in enumerate(self._slots) if member is None]
        assert self._decoder is not None
        chosen = empty[: len(members)]
        self._decoder.replace(chosen, states)
        for slot, member in zip(chosen, members, strict=True):
            self._slots[slot] = member
        self._arrange()

    def leave(self, members: Sequence[Member]) -> None:
        """Let members leave."""
        if not members:
            return
        leaving = [self._slot_of[id(member)] for member in members]
        assert self._decoder is not None
        self._decoder.clear(leaving)
        for slot in leaving:
            self._slots[slot] = None
        self._arrange()
        if 2 * num_slots(len(self.members)) <= self.count:
            self._resize(num_slots(len(self.members)), None)

    def step(self, tokens: Sequence[int]) -> Tensor:
        """One more token of every member; returns their logits `[members, vocab]`, valid until the next step."""
        assert self._decoder is not None
        if len(tokens) != len(self.members):
            raise ValueError(f"there are {len(self.members)} members; got {len(tokens)} tokens")
        new = torch.zeros(self.count, dtype=torch.int64)
        new[self._occupied] = torch.tensor(tokens)
        logits = self._decoder.step(new.to(self._decoder.device))
        return logits if len(tokens) == self.count else logits[self._occupied.to(logits.device)]

    def states(self, members: Sequence[Member]) -> LMState:
        """The states of some members, to be continued elsewhere."""
        assert self._decoder is not None
        return self._decoder.state([self._slot_of[id(member)] for member in members])

    def clear(self) -> None:
        """Let all members leave, whatever state they are in."""
        self._decoder, self._slots = None, []
        self._arrange()

    def _resize(self, count: int, like: LMState | None) -> None:
        """Move the members to this many slots. The first slots of all have memory for states of the kind of `like`."""
        kept = [self._slot_of[id(member)] for member in self.members]
        filling = [0] * (count - len(kept))  # any state will do: it is cleared
        if self._decoder is None:
            assert like is not None
            some = like.select(filling)
            self._decoder = Decoder(self.model, some, graphs=self.graphs, on_warning=self.on_warning)
        else:
            self._decoder.select(kept + filling)
        self._slots = [*self.members, *[None] * len(filling)]
        self._decoder.clear(range(len(kept), count))
        self._arrange()

    def _arrange(self) -> None:
        self._slot_of = {id(member): slot for slot, member in enumerate(self._slots) if member is not None}
        self.members = [member for member in self._slots if member is not None]
        self._occupied = torch.tensor([slot for slot, member in enumerate(self._slots) if member is not None]).long()


def bytes_per_slot(model: LM, longest: int) -> int:
    """Bytes that each slot takes with room for sequences of this length. Nothing is allocated to find out."""
    with unallocated():
        ghost = model.config.build(model.vocab_size).to(model.embedding.weight.dtype)
        sizes = []
        for batch in (1, 2):  # some memory is not for any row
            states = [block.static_state(block.init_state(batch)) for block in ghost.blocks]
            held = [one for one in states if one is not None]
            for one in held:
                one.make_room(longest)
            sizes.append(sum(one.nbytes for one in held))
    return sizes[1] - sizes[0]


def num_slots(count: int) -> int:
    """The number of slots for this many sequences: one of few sizes, of which at most a third is empty."""
    sizes = itertools.chain.from_iterable((1 << level, 3 << level >> 1) for level in itertools.count())
    return next(size for size in sizes if size >= count)
