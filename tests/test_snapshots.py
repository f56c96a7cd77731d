"""Snapshots: the state again, blocks shared and counted once; the cache finds the longest prefix, within bounds."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from logdepth.models import LM, LMState
from logdepth.serve.snapshots import Holdings, Prefix, PrefixCache, Snapshot, num_shared_blocks
from tests.block_states import close, same_state
from tests.decoders import built, every_model, random_tokens


def read(model: LM, tokens: torch.Tensor, state: LMState | None = None) -> LMState:
    with torch.no_grad():
        return model.step(tokens[None], model.init_state(1) if state is None else state)[1]


@every_model
def test_a_snapshot_is_the_state(name: str) -> None:
    model, tokens = built(name), random_tokens(70)
    state = read(model, tokens[:37])
    first = Snapshot.of(state)
    same_state(first.state(), state)
    later = read(model, tokens[37:], first.state())
    second = Snapshot.of(later, torch.ones(3), earlier=first)
    same_state(second.state(), later)
    same_state(first.state(), state)
    same_state(second.state(), read(model, tokens))
    assert second.length == 70
    assert second.nbytes >= later.nbytes
    more = random_tokens(5, seed=2)
    with torch.no_grad():
        close(model.step(more[None], second.state())[0][0], model(torch.cat([tokens, more])[None])[0, 70:])


@pytest.mark.parametrize("name", ["ar-grc", "scan-heads", "memory-chunk-4"])
def test_later_snapshots_share_the_larger_blocks(name: str) -> None:
    model, tokens = built(name), random_tokens(1100)
    first = Snapshot.of(read(model, tokens[:1024]))
    second = Snapshot.of(read(model, tokens[1024:], first.state()), earlier=first)
    shared = {id(one) for one in first.tensors()} & {id(one) for one in second.tensors()}
    tables = {"ar-grc": 2, "scan-heads": 4, "memory-chunk-4": 1}[name]  # a block of 1024 tokens in each
    assert len(shared) == tables
    holdings = Holdings()
    holdings.add(first)
    holdings.add(second)
    width = next(one for one in first.tensors() if id(one) in shared).nbytes
    assert holdings.nbytes == first.nbytes + second.nbytes - tables * width
    holdings.remove(first)
    assert holdings.nbytes == second.nbytes
    holdings.remove(second)
    assert holdings.nbytes == 0


@given(length=st.integers(0, 5000), added=st.integers(0, 5000))
def test_shared_blocks_are_those_that_cover_the_same_tokens(length: int, added: int) -> None:
    def blocks(total: int) -> list[tuple[int, int]]:
        found, start = [], 0
        for level in reversed(range(total.bit_length())):
            if total >> level & 1:
                found.append((start, start + (1 << level)))
                start += 1 << level
        return found

    shared = num_shared_blocks(length, length + added)
    earlier, later = blocks(length), blocks(length + added)
    assert earlier[:shared] == later[:shared]
    assert shared == len(later) or shared == len(earlier) or earlier[shared] != later[shared]


def test_storage_holds_nothing_else() -> None:
    model = built("rope-window-5")
    state = read(model, random_tokens(40))
    wide = LMState(state.blocks, state.lengths)
    key = wide.blocks[0].keys
    blocks = (wide.blocks[0]._replace(keys=torch.cat([key, key])[:1]),)
    assert Snapshot.of(LMState(blocks, state.lengths)).nbytes == Snapshot.of(state).nbytes


def made_up(length: int, *, features: bool = True, width: int = 4) -> Snapshot:
    """Without any block: `features` are all that it holds."""
    return Snapshot(length, (), torch.zeros(width) if features else None)


@settings(max_examples=200)
@given(
    added=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=11), max_size=12),
    wanted=st.lists(st.integers(0, 1), min_size=1, max_size=11),
    spacing=st.sampled_from([1, 2, 4]),
    features=st.booleans(),
)
def test_the_longest_prefix_is_found(added: list[list[int]], wanted: list[int], spacing: int, features: bool) -> None:
    cache = PrefixCache(10**9, spacing)
    for tokens in added:
        cache.add(Prefix(tokens, spacing), made_up(len(tokens), features=features))
    usable = [one for one in added if wanted[: len(one)] == one and (features or len(one) < len(wanted))]
    found = cache.find(Prefix(wanted, spacing))
    assert (0 if found is None else found.length) == max(map(len, usable), default=0)
    assert len(cache) == len({tuple(one) for one in added})
    cache.clear()
    assert (len(cache), cache.nbytes, cache._rests) == (0, 0, {})


def test_what_was_used_longest_ago_gives_way() -> None:
    tokens = np.arange(100).tolist()
    cache = PrefixCache(3 * 16, 8)
    for length in (10, 20, 30):
        cache.add(Prefix(tokens[:length], 8), made_up(length))
    assert cache.find(Prefix(tokens[:15], 8)).length == 10
    cache.add(Prefix(tokens[:40], 8), made_up(40))
    assert cache.lengths() == [30, 10, 40]
    cache.add(Prefix(tokens[:30], 8), made_up(30))  # known already
    assert (cache.lengths(), cache.nbytes) == ([10, 40, 30], 48)
    cache.add(Prefix(tokens[:50], 8), made_up(50, width=99))  # more than there is room for
    assert (cache.lengths(), cache.nbytes) == ([], 0)


def test_a_snapshot_that_says_what_the_head_reads_replaces_one_that_does_not() -> None:
    cache, prefix = PrefixCache(10**9, 4), Prefix([1, 2, 3, 4, 5], 4)
    cache.add(prefix, made_up(5, features=False))
    assert cache.find(prefix) is None
    cache.add(prefix, made_up(5))
    cache.add(prefix, made_up(5, features=False))
    assert cache.find(prefix).features is not None
    assert len(cache) == 1


def test_hashes_are_of_all_tokens_before() -> None:
    one, other = Prefix([1, 2, 3, 4, 5, 6], 2), Prefix([9, 2, 3, 4, 5, 6], 2)
    assert one.key(0) == other.key(0)
    assert all(one.key(length) != other.key(length) for length in range(1, 7))
    assert Prefix([1, 2, 3], 2).key(3) == one.key(3)
