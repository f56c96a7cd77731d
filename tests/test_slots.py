"""Slots: whoever joins and leaves, each sequence gets the logits that it would get alone."""

import numpy as np
import pytest
import torch

from logdepth.decoding import Slots
from logdepth.decoding.slots import num_slots
from logdepth.models import LMState
from tests.block_states import close, same_state
from tests.decoders import Rehearsed, built, prefilled, random_tokens
from tests.small_models import VOCAB


@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "graphs"])
@pytest.mark.parametrize("name", ["ar-grc", "hybrid", "memory-window", "memory-fold", "transformer-alibi"])
def test_sequences_join_and_leave(name: str, graphs: bool) -> None:
    model, chance = built(name), np.random.default_rng(1)
    slots: Slots[str] = Slots(model)
    alone: dict[str, LMState] = {}
    counts = set()
    for number in range(60):
        wanted = 17 if number < 25 else 1  # from few to many, and back to none
        if len(alone) < wanted and chance.random() < 0.6:
            some = [f"{number}-{one}" for one in range(chance.integers(1, 5))]
            states = prefilled(model, chance.integers(1, 40, len(some)).tolist())
            slots.join(some, states, coming=int(chance.integers(3)))
            alone |= {member: states.select([place]) for place, member in enumerate(some)}
            if graphs and not isinstance(slots._decoder._graphs, Rehearsed):
                slots._decoder._graphs = Rehearsed(slots._decoder)
        leaving = [member for member in alone if chance.random() < (0.05 if number < 25 else 0.2)]
        slots.leave(leaving)
        for member in leaving:
            del alone[member]
        assert sorted(slots.members) == sorted(alone)
        assert len(alone) <= slots.count
        counts.add(slots.count)
        if not alone:
            continue
        tokens = random_tokens(len(alone), seed=number)
        logits = slots.step(tokens.tolist()).clone()
        assert logits.shape == (len(alone), VOCAB)
        for member, token, row in zip(slots.members, tokens, logits, strict=True):
            with torch.no_grad():
                expected, alone[member] = model.step(token.view(1, 1), alone[member])
            close(row, expected[0, 0])
        member = slots.members[-1]
        same_state(slots.states([member]), alone[member])
    assert len(counts) >= 4  # memory has grown and shrunk
    assert slots.count <= 3


def test_memory_is_for_the_members_of_now() -> None:
    model = built("hybrid")
    slots: Slots[int] = Slots(model)
    slots.join(range(24), prefilled(model, [30] * 24))
    whole = slots.nbytes
    slots.leave(range(1, 24))
    assert slots.members == [0]
    assert slots.nbytes < whole / 8
    slots.clear()
    assert (slots.members, slots.count, slots.nbytes) == ([], 0, 0)
    slots.join([1], prefilled(model, [3]))
    assert slots.step([2]).shape == (1, VOCAB)


def test_few_sizes() -> None:
    assert [num_slots(count) for count in (0, 1, 2, 3, 4, 5, 7, 9, 13, 17, 64, 65, 1000)] == [
        1, 1, 2, 3, 4, 6, 8, 12, 16, 24, 64, 96, 1024,
    ]  # fmt: skip
    assert all(num_slots(count) <= 1.5 * count for count in range(1, 2000))


def test_tokens_must_be_as_many_as_members() -> None:
    model = built()
    slots: Slots[int] = Slots(model)
    slots.join([1, 2], prefilled(model, [3, 4]))
    with pytest.raises(ValueError, match="there are 2 members; got 1 tokens"):
        slots.step([1])
