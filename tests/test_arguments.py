"""Wrong arguments: every error names what was wrong, its value, and what is expected."""

from typing import Any

import numpy as np
import pytest
import torch

from logdepth import ScanState, reduce, scan
from tests.toy import WIDTH, Toy, assert_same, random_elements, sequences

BATCH = random_elements(2, 5, WIDTH)
PACKED = random_elements(7, WIDTH)


@pytest.mark.parametrize("function", [scan, reduce])
@pytest.mark.parametrize(
    ("elements", "arguments", "error", "message"),
    [
        ([[1.0]], {}, TypeError, "elements must be a tensor; got list"),
        (BATCH[0, 0], {}, ValueError, r"elements must be \[batch, length, width\]; got shape \(3,\)"),
        (PACKED, {}, ValueError, r"got shape \(7, 3\) \(one element per row .*; packed documents need cu_seqlens\)"),
        (BATCH[None], {}, ValueError, r"got shape \(1, 2, 5, 3\)$"),
        (BATCH, {"cu_seqlens": [0, 10]}, ValueError, r"packed \[total, width\]; got shape \(2, 5, 3\)"),
        (BATCH, {"lengths": [5, 5], "cu_seqlens": [0, 10]}, ValueError, "give only one of them"),
        (BATCH, {"lengths": [5]}, ValueError, "one entry for each of the 2 rows; got 1"),
        (BATCH, {"lengths": [5, 6]}, ValueError, r"lengths\[1\] = 6 is outside 0 … 5"),
        (BATCH, {"lengths": [-1, 5]}, ValueError, r"lengths\[0\] = -1 is outside 0 … 5"),
        (BATCH, {"lengths": [2.5, 5.0]}, TypeError, r"lengths must be a flat list of integers; got \[2.5, 5.0\]"),
        (BATCH, {"lengths": torch.ones(2, 1).int()}, TypeError, r"got torch.int32 of shape \(2, 1\)"),
        (BATCH, {"lengths": [[1], [2, 3]]}, TypeError, r"flat list of integers; got \[\[1\], \[2, 3\]\]"),
        (BATCH, {"lengths": torch.ones(2, dtype=torch.bfloat16)}, TypeError, "got torch.bfloat16"),
        (BATCH, {"lengths": 5}, TypeError, "flat list of integers; got 5"),
        (BATCH, {"lengths": torch.tensor([True, False])}, TypeError, "got torch.bool"),
        (PACKED, {"cu_seqlens": []}, ValueError, "must run from 0 to 7, .* it runs nothing"),
        (PACKED, {"cu_seqlens": [0, 3, 6]}, ValueError, "must run from 0 to 7, .* it runs 0 … 6"),
        (PACKED, {"cu_seqlens": [1, 3, 7]}, ValueError, "must run from 0 to 7, .* it runs 1 … 7"),
        (PACKED, {"cu_seqlens": [0, 5, 3, 7]}, ValueError, "must not decrease: entry 1 is 5, entry 2 is 3"),
    ],
)
def test_elements_and_lengths(
    function: Any, elements: Any, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        function(Toy(), elements, **arguments)


def test_states_that_do_not_fit() -> None:
    state = scan(Toy(), BATCH).state
    with pytest.raises(TypeError, match="state must be a ScanState, as an earlier scan returned it; got Tensor"):
        scan(Toy(), BATCH, state.blocks)
    with pytest.raises(ValueError, match="state has 2 rows, but there are 3 rows of the batch"):
        scan(Toy(), random_elements(3, 5, WIDTH), state)
    with pytest.raises(ValueError, match="state has 2 rows, but there are 1 documents"):
        scan(Toy(), PACKED, state, cu_seqlens=[0, 7])
    with pytest.raises(ValueError, match="state has width 3, but elements have width 4"):
        scan(Toy(width=4), random_elements(2, 5, 4), state)
    with pytest.raises(ValueError, match=r"state has dtype torch.float64, but elements have dtype torch.float32"):
        scan(Toy().float(), BATCH.float(), state)
    with pytest.raises(ValueError, match="state is on meta, but elements are on cpu"):
        scan(Toy(), BATCH, state.to("meta"))
    with pytest.raises(ValueError, match="state has width 9"):
        scan(Toy(), BATCH[:, :0], ScanState.empty(2, 9, dtype=torch.float64))


def test_reduce_of_an_empty_row() -> None:
    with pytest.raises(ValueError, match="cannot reduce row 1: it has no elements"):
        reduce(Toy(), BATCH, lengths=[2, 0])
    with pytest.raises(ValueError, match="cannot reduce document 0: it has no elements"):
        reduce(Toy(), PACKED, cu_seqlens=[0, 0, 7])
    with pytest.raises(ValueError, match="cannot reduce row 0"):
        reduce(Toy(), BATCH[:, :0])


def test_lengths_come_in_many_forms() -> None:
    batch = torch.stack(sequences([5, 5]))
    expected = scan(Toy(), batch, lengths=[2, 4]).prefixes
    for lengths in ((2, 4), np.array([2, 4], dtype=np.uint8), torch.tensor([2, 4], dtype=torch.int32)):
        assert_same(scan(Toy(), batch, lengths=lengths).prefixes, expected)
