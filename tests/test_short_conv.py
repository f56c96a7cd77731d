"""The short convolution by kernels equals plain torch in float64: values and gradients."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from logdepth.ops import kernels, short_conv
from tests.kernel_numbers import DEVICE, assert_close

SHAPES = [(2, 70, 5, 4), (3, 7, 70, 4), (2, 2, 3, 4), (1, 64, 3, 1), (1, 130, 4, 2), (2, 61, 3, 4)]
"""Rows, length, width, and tokens that are read."""


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype).requires_grad_()


def run(given: list[Tensor], grad: Tensor, *, by_kernels: bool) -> list[Tensor]:
    x, weight, *before = given
    with kernels(by_kernels):
        out = short_conv(x, before[0] if before else None, weight)
    return [out, *torch.autograd.grad(out, given, grad.to(out.dtype))]


@pytest.mark.parametrize(("rows", "length", "width", "size"), SHAPES)
@pytest.mark.parametrize("with_before", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_and_gradients(
    rows: int, length: int, width: int, size: int, with_before: bool, dtype: torch.dtype
) -> None:
    given = [random(rows, length, width, dtype=dtype), random(size, width)]
    if with_before:
        given.append(random(rows, size - 1, width))
    grad = torch.randn(rows, length, width, device=DEVICE)
    found = run(given, grad.to(dtype), by_kernels=True)
    exact = run([one.detach().double().requires_grad_() for one in given], grad.to(dtype), by_kernels=False)
    for one, other in zip(found, exact, strict=True):
        assert_close(one, other, dtype)
    assert [one.dtype for one in found] == [dtype, *(one.dtype for one in given)]
    again = run(given, grad.to(dtype), by_kernels=True)
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


def test_any_strides_and_nothing() -> None:
    weight = random(4, 6)
    x, grad = random(6, 9, 2), torch.randn(9, 6, 2, device=DEVICE)
    given = [x.transpose(0, 2), weight]
    found = run(given, grad.transpose(0, 1).transpose(0, 2), by_kernels=True)
    expected = run(given, grad.transpose(0, 1).transpose(0, 2), by_kernels=False)
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other)
    for shape in ((0, 3, 6), (2, 0, 6)):
        out, *grads = run([random(*shape), weight], torch.zeros(shape, device=DEVICE), by_kernels=True)
        assert out.shape == shape
        assert not grads[1].any()
