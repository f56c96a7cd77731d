"""How tokens are arranged: positions, rows and back, the last entries of rows, and what is refused."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from logdepth.blocks import Layout, StepLayout
from logdepth.scanning.step import Together
from tests.toy import boundaries

CPU = torch.device("cpu")
some_lengths = st.lists(st.integers(0, 9), max_size=7)


def layout_of(*shape: int, **arguments: Any) -> Layout:
    return Layout(torch.Size(shape), **arguments)


def packed(lengths: list[int], **arguments: Any) -> Layout:
    return layout_of(sum(lengths), cu_seqlens=boundaries(lengths), **arguments)


def test_rows_of_one_length() -> None:
    layout = layout_of(3, 5)
    assert (layout.num_rows, layout.longest, layout.packed, layout.fresh) == (3, 5, False, True)
    assert layout.new.tolist() == layout.lengths_after.tolist() == [5, 5, 5]
    assert layout.positions(CPU).tolist() == layout.row_positions(CPU).tolist() == [0, 1, 2, 3, 4]
    x = torch.randn(3, 5, 2)
    assert layout.to_rows(x) is x
    assert layout.from_rows(x) is x


def test_padded_rows() -> None:
    layout = layout_of(3, 5, lengths=[5, 0, 2])
    assert (layout.num_rows, layout.longest, layout.fresh) == (3, 5, True)
    assert layout.new.tolist() == layout.lengths_after.tolist() == [5, 0, 2]
    assert layout.positions(CPU).tolist() == [0, 1, 2, 3, 4]
    assert layout_of(3, 5, lengths=torch.tensor([5, 0, 2])).new.tolist() == [5, 0, 2]


def test_continued_rows() -> None:
    layout = layout_of(2, 3, absorbed=np.array([7, 7]))
    assert not layout.fresh
    assert layout.positions(CPU).tolist() == [7, 8, 9]
    assert layout.lengths_after.tolist() == [10, 10]
    layout = layout_of(2, 3, lengths=[1, 3], absorbed=np.array([7, 0]))
    assert layout.positions(CPU).tolist() == [[7, 8, 9], [0, 1, 2]]
    assert layout.lengths_after.tolist() == [8, 3]
    assert layout_of(2, 3, absorbed=np.array([0, 0])).fresh, "nothing was absorbed"


def test_lengths_are_not_changed_with_what_they_came_from() -> None:
    absorbed = np.array([4, 2])
    layout = layout_of(2, 3, absorbed=absorbed)
    after = layout.lengths_after
    after += 1
    assert absorbed.tolist() == [4, 2]
    fresh = layout_of(2, 3, lengths=[1, 2])
    fresh.lengths_after[:] = 9
    assert fresh.new.tolist() == [1, 2]


def test_packed_documents() -> None:
    layout = packed([2, 0, 3])
    assert (layout.num_rows, layout.longest, layout.packed, layout.fresh) == (3, 3, True, True)
    assert layout.new.tolist() == layout.lengths_after.tolist() == [2, 0, 3]
    assert layout.row_positions(CPU).tolist() == [0, 1, 2]
    assert layout.positions(CPU).tolist() == [0, 1, 0, 1, 2]
    rows = layout.to_rows(torch.arange(1, 6)[:, None])
    assert rows[..., 0].tolist() == [[1, 2, 0], [0, 0, 0], [3, 4, 5]]
    continued = packed([2, 0, 3], absorbed=np.array([5, 1, 0]))
    assert continued.positions(CPU).tolist() == [5, 6, 0, 1, 2]
    assert continued.lengths_after.tolist() == [7, 1, 3]


@given(lengths=some_lengths, width=st.integers(1, 3))
def test_rows_and_back(lengths: list[int], width: int) -> None:
    layout, x = packed(lengths), torch.randn(sum(lengths), width)
    rows = layout.to_rows(x)
    assert rows.shape == (len(lengths), max(lengths, default=0), width)
    for row, length, document in zip(rows, lengths, torch.split(x, lengths), strict=True):
        assert torch.equal(row[:length], document)
        assert not row[length:].any()
    assert torch.equal(layout.from_rows(rows), x)


def test_gradients_pass_through_rows_and_back() -> None:
    layout, x = packed([2, 0, 3]), torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layout.from_rows(layout.to_rows(x).sin()), x)


def latest_by_definition(entries: Tensor, count: int, new: list[int]) -> Tensor:
    return torch.stack([row[: count + length][length:] for row, length in zip(entries, new, strict=True)])


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5), count=st.integers(0, 4), as_packed=st.booleans())
def test_the_last_entries_of_each_row(lengths: list[int], count: int, as_packed: bool) -> None:
    length = max(lengths)
    layout = packed(lengths) if as_packed else layout_of(len(lengths), length, lengths=lengths)
    entries = torch.randn(len(lengths), count + length, 3)
    assert torch.equal(layout.latest(entries, count), latest_by_definition(entries, count, lengths))
    assert torch.equal(layout.latest(entries[..., 0], count), latest_by_definition(entries[..., 0], count, lengths))
    whole = layout_of(len(lengths), length)
    assert torch.equal(whole.latest(entries, count), entries[:, length:])


def test_tensors_are_made_once() -> None:
    layout = packed([2, 0, 3], absorbed=np.array([5, 1, 0]))
    assert layout.row_positions(CPU) is layout.row_positions(CPU)
    assert layout._index(CPU) is layout._index(CPU)


def test_a_step_has_its_positions_in_memory_of_its_own() -> None:
    positions = torch.tensor([[4], [9]])
    layout = StepLayout(positions, Together(0, True), torch.zeros(0, dtype=torch.int64))
    assert (layout.shape, layout.num_rows, layout.longest, layout.fresh) == ((2, 1), 2, 1, False)
    assert layout.positions(CPU) is positions
    positions += 1
    assert layout.row_positions(CPU).tolist() == [[5], [10]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shape": (2, 3), "lengths": [1, 2], "cu_seqlens": [0, 2]}, "give one of them"),
        ({"shape": (2, 3), "lengths": [1]}, r"lengths must be 2 numbers from 0 to 3; got \[1\]"),
        ({"shape": (2, 3), "lengths": [1, 4]}, r"lengths must be 2 numbers from 0 to 3; got \[1, 4\]"),
        ({"shape": (2, 3), "lengths": [1, -1]}, "lengths must be 2 numbers from 0 to 3"),
        ({"shape": (5,), "cu_seqlens": [0, 4]}, r"cu_seqlens must rise from 0 to the 5 packed tokens; got \[0, 4\]"),
        ({"shape": (5,), "cu_seqlens": [1, 5]}, "must rise from 0 to the 5 packed tokens"),
        ({"shape": (5,), "cu_seqlens": [0, 3, 2, 5]}, "must rise from 0 to the 5 packed tokens"),
        ({"shape": (5,), "cu_seqlens": []}, "must rise from 0 to the 5 packed tokens"),
        ({"shape": (2, 3), "absorbed": np.array([1])}, "tokens have 2 rows, but the state has 1"),
        ({"shape": (5,), "cu_seqlens": [0, 2, 5], "absorbed": np.array([1])}, "tokens have 2 rows"),
    ],
)
def test_arrangements_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout_of(*arguments.pop("shape"), **arguments)


def test_nothing_at_all() -> None:
    for layout in (layout_of(0, 3), layout_of(0, 3, lengths=[]), packed([])):
        assert layout.num_rows == 0
        assert layout.lengths_after.tolist() == []
    empty = packed([])
    assert empty.to_rows(torch.zeros(0, 2)).shape == (0, 0, 2)
    assert empty.from_rows(torch.zeros(0, 0, 2)).shape == (0, 2)
    assert layout_of(2, 0).positions(CPU).tolist() == []
