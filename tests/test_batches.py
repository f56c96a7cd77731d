"""Batches: each window once per epoch, replayable, in equal shares over the ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logdepth.data import Batches, document_bounds
from logdepth.errors import UserError
from tests.tiny_corpus import store_of


@given(
    length=st.integers(2, 300),
    batch_size=st.integers(1, 5),
    context=st.integers(1, 20),
    seed=st.integers(0, 2**40),
    shifted=st.booleans(),
)
def test_an_epoch_visits_each_window_once(length: int, batch_size: int, context: int, seed: int, shifted: bool) -> None:
    store = store_of(list(range(length)))
    settings = {"batch_size": batch_size, "context": context, "seed": seed, "shifted": shifted}
    if (length - (context if shifted else 1)) // context < batch_size:
        with pytest.raises(UserError, match=f"has {length:,} tokens, fewer than one batch of"):
            Batches(store, **settings)
        return
    batches = Batches(store, **settings)
    for epoch in range(3):
        starts = []
        for step in range(batches.steps_per_epoch):
            batch = batches.at(epoch * batches.steps_per_epoch + step)
            assert batch.shape == (batch_size, context + 1)
            assert (np.diff(batch, axis=1) == 1).all()
            starts += batch[:, 0].tolist()
        assert len(set(starts)) == len(starts)
        shifts = {start % context for start in starts}
        assert len(shifts) == 1 if shifted else shifts == {0}


def test_shifted_epochs_cut_the_text_at_different_places() -> None:
    batches = Batches(store_of(list(range(1000))), batch_size=2, context=16, seed=0, shifted=True)
    shifts = {int(batches.at(epoch * batches.steps_per_epoch)[0, 0]) % 16 for epoch in range(200)}
    assert shifts == set(range(16))


@pytest.mark.parametrize("shifted", [False, True])
def test_a_batch_is_a_function_of_seed_and_step(shifted: bool) -> None:
    store = store_of(list(range(1000)))

    def batches(seed: int) -> Batches:
        return Batches(store, batch_size=4, context=10, seed=seed, shifted=shifted)

    one, other = batches(1), batches(1)
    for step in (30, 7, 0, 100, 7):
        assert (one.at(step) == other.at(step)).all()
    assert (batches(2).at(7) != one.at(7)).any()
    assert (one.at(7) != one.at(7 + one.steps_per_epoch)).any()


@given(
    share=st.integers(1, 4),
    world_size=st.integers(1, 5),
    context=st.integers(1, 9),
    seed=st.integers(0, 2**40),
    shifted=st.booleans(),
    step=st.integers(0, 100),
)
def test_the_shares_of_all_ranks_are_the_batch(
    share: int, world_size: int, context: int, seed: int, shifted: bool, step: int
) -> None:
    def batches(**rank: int) -> Batches:
        store = store_of(list(range(400)))
        return Batches(store, batch_size=share * world_size, context=context, seed=seed, shifted=shifted, **rank)

    shares = [batches(rank=rank, world_size=world_size).at(step) for rank in range(world_size)]
    assert {one.shape for one in shares} == {(share, context + 1)}
    assert (np.concatenate(shares) == batches().at(step)).all()


@given(batch_size=st.integers(1, 20), world_size=st.integers(1, 20))
def test_batches_that_do_not_divide_into_equal_shares_are_refused(batch_size: int, world_size: int) -> None:
    settings = {"batch_size": batch_size, "context": 4, "seed": 0, "rank": 0, "world_size": world_size}
    if batch_size % world_size == 0:
        assert len(Batches(store_of(list(range(400))), **settings).at(0)) * world_size == batch_size
        return
    message = f"--train.batch-size {batch_size} is not a multiple of {world_size}, the number of ranks"
    with pytest.raises(UserError, match=f"^{message}$"):
        Batches(store_of(list(range(400))), **settings)


@pytest.mark.parametrize("rank", [-1, 2])
def test_ranks_beyond_the_world_are_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=f"rank must be from 0 to below world_size; got {rank} of 2"):
        Batches(store_of(list(range(400))), batch_size=2, context=4, seed=0, rank=rank, world_size=2)


def test_documents_end_with_separators_and_rows() -> None:
    inputs = np.array([[5, 2, 6, 7], [2, 2, 8, 2]])
    assert document_bounds(inputs, 2) == [0, 2, 4, 5, 6, 8]
    assert inputs.tolist() == [[5, 2, 6, 7], [2, 2, 8, 2]]
