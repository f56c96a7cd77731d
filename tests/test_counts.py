"""Counts operator calls, merged rows and the size of a state."""

from math import ceil, log2

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from logdepth import reduce, scan
from tests.toy import Counting, boundaries


def most_calls(length: int) -> int:
    return 2 * ceil(log2(length)) if length else 0


@pytest.mark.parametrize("batch", [1, 3])
def test_every_length_to_4096(batch: int) -> None:
    elements = torch.zeros(batch, 4096, 1)
    for length in range(1, 4097) if batch == 1 else range(1, 4097, 61):
        operator = Counting()
        scan(operator, elements[:, :length])
        assert operator.rows < 2 * length * batch, length
        assert len(operator.calls) <= most_calls(length), length


@given(lengths=st.lists(st.integers(0, 300), min_size=1, max_size=40))
def test_ragged_calls_are_those_of_the_longest(lengths: list[int]) -> None:
    operator = Counting()
    scan(operator, torch.zeros(sum(lengths), 1), cu_seqlens=boundaries(lengths))
    assert len(operator.calls) <= most_calls(max(lengths))
    assert operator.rows <= sum(max(0, 2 * length - 1) for length in lengths)


@given(old=st.integers(0, 5000), new=st.integers(1, 600))
def test_continuing_from_a_state(old: int, new: int) -> None:
    state = scan(Counting(), torch.zeros(1, old, 1)).state
    operator = Counting()
    scan(operator, torch.zeros(1, new, 1), state)
    assert operator.rows <= 2 * new + int(log2(old + new))


def test_streaming() -> None:
    operator, state = Counting(), None
    for length in range(1, 1025):
        state = scan(operator, torch.zeros(1, 1, 1), state).state
        assert operator.rows < 2 * length
        assert len(state.blocks) == len(state.prefixes) <= ceil(log2(length + 1))
        assert state.nbytes == 2 * 4 * length.bit_count()


@pytest.mark.parametrize("length", [1, 2, 3, 64, 97, 1000, 4096])
def test_reduce_is_the_up_sweep_and_one_fold(length: int) -> None:
    operator = Counting()
    reduce(operator, torch.zeros(2, length, 1))
    assert operator.rows == 2 * (length - 1)
    assert len(operator.calls) <= most_calls(length)


@given(lengths=st.lists(st.integers(1, 200), min_size=1, max_size=20))
def test_reduce_of_ragged_rows(lengths: list[int]) -> None:
    operator = Counting()
    reduce(operator, torch.zeros(sum(lengths), 1), cu_seqlens=np.array(boundaries(lengths)))
    assert operator.rows == sum(lengths) - len(lengths)
    assert len(operator.calls) <= most_calls(max(lengths))
