"""The contract with operators: pairs, checked answers, autocast."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from logdepth import reduce, scan
from tests.toy import WIDTH, Toy, assert_same, random_elements

ELEMENTS = random_elements(2, 6, WIDTH)


@pytest.mark.parametrize(
    ("operator", "got"),
    [
        (None, "got None"),
        ((Toy(),), "got tuple of 1"),
        ([Toy(), Toy(), Toy()], "got list of 3"),
        ((Toy(), None), "got tuple of 2"),
        ("grc", "got 'grc'"),
    ],
)
def test_what_is_no_operator(operator: Any, got: str) -> None:
    for function in (scan, reduce):
        with pytest.raises(TypeError, match=f"operator must be a callable .* or a pair .*; {got}"):
            function(operator, ELEMENTS)


@pytest.mark.parametrize(
    ("operator", "error", "message"),
    [
        (lambda left, right: left[:, :2], ValueError, r"changed the shape: operands \(6, 3\), result \(6, 2\)"),
        (lambda left, right: left[:1], ValueError, r"changed the shape: operands \(6, 3\), result \(1, 3\)"),
        (
            lambda left, right: left.float(),
            TypeError,
            "changed the dtype: operands torch.float64, result torch.float32",
        ),
        (lambda left, right: left.to("meta"), ValueError, "changed the device: operands on cpu, result on meta"),
        (lambda left, right: (left, right), TypeError, r"must return a tensor of shape \(6, 3\); got tuple"),
    ],
)
def test_answers_are_checked(operator: Any, error: type[Exception], message: str) -> None:
    for function in (scan, reduce):
        with pytest.raises(error, match=message):
            function(operator, ELEMENTS)


def test_a_pair_may_be_a_list_or_a_module_list() -> None:
    up, down = Toy(1), Toy(2)
    expected = scan((up, down), ELEMENTS).prefixes
    assert_same(scan([up, down], ELEMENTS).prefixes, expected)
    assert_same(scan(tuple(nn.ModuleList([up, down])), ELEMENTS).prefixes, expected)


@pytest.mark.parametrize("checkpoint", [False, True])
def test_under_autocast_the_answer_is_cast_back(checkpoint: bool) -> None:
    linear = nn.Linear(2 * WIDTH, WIDTH)
    seen = []

    def operator(left: Tensor, right: Tensor) -> Tensor:
        merged = linear(torch.cat([left, right], dim=-1))
        seen.append((left.dtype, merged.dtype))
        return merged

    elements = ELEMENTS.float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = scan(operator, elements, checkpoint=checkpoint)
    assert set(seen) == {(torch.float32, torch.bfloat16)}
    assert result.prefixes.dtype == result.state.dtype == torch.float32
    result.prefixes.sum().backward()
    assert set(seen) == {(torch.float32, torch.bfloat16)}
    assert elements.grad.dtype == torch.float32
    assert linear.weight.grad.isfinite().all()


def test_what_the_operator_sees_is_two_matrices_of_equal_shape() -> None:
    def operator(left: Tensor, right: Tensor) -> Tensor:
        assert left.ndim == 2
        assert left.shape == right.shape
        assert left.shape[0] > 0
        return left

    scan(operator, random_elements(3, 13, 2))
    scan(operator, random_elements(9, 2), cu_seqlens=[0, 0, 1, 9])
