"""The contract with operators: pairs, checked answers, autocast."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from logdepth import reduce, scan
from logdepth.operators import AffineOperator
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
        (Toy, "got the class Toy, not an instance"),
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
        (lambda left, right: left.mul_(2) + right, ValueError, "changed its operands in place; return a new tensor"),
        (lambda left, right: right.add_(left), ValueError, "changed its operands in place; return a new tensor"),
        (lambda left, right: (left, right), TypeError, r"must return a tensor of shape \(6, 3\); got tuple"),
    ],
)
def test_answers_are_checked(operator: Any, error: type[Exception], message: str) -> None:
    for function in (scan, reduce):
        with pytest.raises(error, match=message):
            function(operator, ELEMENTS.clone())


def test_a_pair_may_be_a_list_or_a_module_list() -> None:
    up, down = Toy(1), Toy(2)
    expected = scan((up, down), ELEMENTS).prefixes
    assert_same(scan([up, down], ELEMENTS).prefixes, expected)
    assert_same(scan(nn.ModuleList([up, down]), ELEMENTS).prefixes, expected)


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("as_module", [False, True])
def test_under_autocast_the_answer_is_cast_back(checkpoint: bool, as_module: bool) -> None:
    linear = nn.Linear(2 * WIDTH, WIDTH)
    seen = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            merged = self.linear(torch.cat([left, right], dim=-1))
            seen.append((left.dtype, merged.dtype))
            return merged

    operator = Watched() if as_module else Watched().forward

    elements = ELEMENTS.float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = scan(operator, elements, checkpoint=checkpoint)
    assert set(seen) == {(torch.float32, torch.bfloat16)}
    num_seen = len(seen)
    assert result.prefixes.dtype == result.state.dtype == torch.float32
    result.prefixes.sum().backward()
    if as_module:
        assert len(seen) == num_seen * (1 + checkpoint)
    assert set(seen) == {(torch.float32, torch.bfloat16)}
    assert elements.grad.dtype == torch.float32
    assert linear.weight.grad.isfinite().all()


@pytest.mark.parametrize("length", [1, 6])
def test_an_operator_that_says_its_width_has_it_checked(length: int) -> None:
    elements = random_elements(2, length, 8)
    for operator in (AffineOperator(6), (AffineOperator(8), AffineOperator(6))):
        with pytest.raises(ValueError, match="operator has width 6, but elements have width 8"):
            scan(operator, elements)
        with pytest.raises(ValueError, match="operator has width 6, but elements have width 8"):
            reduce(operator, elements)


def test_autocast_excuses_floating_point_alone() -> None:
    with torch.autocast("cpu"), pytest.raises(TypeError, match=r"operands torch.float64, result torch.bool, not by"):
        scan(lambda left, right: left > right, ELEMENTS)


def test_what_the_operator_sees_is_two_matrices_of_equal_shape() -> None:
    def operator(left: Tensor, right: Tensor) -> Tensor:
        assert left.ndim == 2
        assert left.shape == right.shape
        assert left.shape[0] > 0
        return left

    scan(operator, random_elements(3, 13, 2))
    scan(operator, random_elements(9, 2), cu_seqlens=[0, 0, 1, 9])
