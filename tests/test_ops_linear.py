"""Linear maps by kernels equal torch's own, in values, gradients and dtypes."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("triton")

from logdepth.ops import ACTIVATIONS, ActivationName, Linear, few_rows_kernel, identity_linear, kernels, scaled_linear
from logdepth.ops.linear import linear
from tests.fused_models import (
    DEVICE,
    few_programs,  # noqa: F401
    reproducible_products,  # noqa: F401
)

LOW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
"""The interpreter multiplies tiles of bfloat16 as if they were whole numbers."""
SHAPES = [(1,), (3,), (2, 5), (70,), (0,), (2, 0)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
with_and_without_bias = pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no-bias"])


def operands(shape: tuple[int, ...], *, with_bias: bool = True, width: int = 8, out: int = 6) -> list[Tensor | None]:
    """x, weight, bias and residual, to be differentiated."""
    made = [torch.randn(*one) for one in ((*shape, width), (out, width), (out,), (*shape, out))]
    x, weight, bias, residual = (one.to(DEVICE).requires_grad_() for one in made)
    return [x, weight, bias if with_bias else None, residual]


def plain(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: ActivationName | None = None
) -> Tensor:
    out = F.linear(x, weight, bias)
    if activation is not None:
        out = ACTIVATIONS[activation](out)
    return out if residual is None else out + residual


def by_kernels(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: ActivationName | None = None
) -> Tensor:
    with kernels(True):
        return linear(x, weight, bias, activation=activation, residual=residual)


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Few rows take their kernel in any dtype; how many rows each launch had."""
    launched: list[int] = []
    original = few_rows_kernel.linear

    def watched(operands: list[Tensor], *arguments: Any, **settings: Any) -> None:
        launched.append(len(operands[-1]))
        original(operands, *arguments, **settings)

    monkeypatch.setattr(few_rows_kernel, "linear", watched)
    monkeypatch.setattr(few_rows_kernel, "fits", lambda x: 0 < len(x) <= few_rows_kernel.MAX_ROWS)
    return launched


@every_shape
@with_and_without_bias
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("with_residual", [True, False], ids=["residual", "alone"])
def test_values_and_gradients(
    shape: tuple[int, ...], with_bias: bool, activation: ActivationName | None, with_residual: bool
) -> None:
    x, weight, bias, residual = operands(shape, with_bias=with_bias)
    arguments = (x, weight, bias, residual if with_residual else None)
    inputs = [one for one in arguments if one is not None]
    found, expected = (one(*arguments, activation) for one in (by_kernels, plain))  # type: ignore[arg-type]
    assert found.shape == (*shape, 6)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(expected)
    for one, other in zip(*(torch.autograd.grad(out, inputs, grad) for out in (found, expected)), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("learns", range(4))
def test_one_gradient_at_a_time(learns: int) -> None:
    """That of the residual too, where nothing else learns."""
    arguments = operands((3,))
    for number, one in enumerate(arguments):
        assert one is not None
        one.requires_grad_(number == learns)
    outs = [one(*arguments, "silu") for one in (by_kernels, plain)]  # type: ignore[arg-type]
    found, expected = (torch.autograd.grad(out.square().sum(), arguments[learns])[0] for out in outs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@every_shape
@with_and_without_bias
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_without_gradients(
    shape: tuple[int, ...], with_bias: bool, mode: Any, activation: ActivationName | None, few_rows: list[int]
) -> None:
    arguments = operands(shape, with_bias=with_bias)
    with mode():
        for residual in (None, arguments[3]):
            found, expected = (one(*arguments[:3], residual, activation) for one in (by_kernels, plain))  # type: ignore[arg-type]
            assert not found.requires_grad
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    rows = torch.Size(shape).numel()
    assert few_rows == ([rows] * 2 if with_bias and 0 < rows <= few_rows_kernel.MAX_ROWS else [])


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_operands_may_lie_apart(rows: int) -> None:
    """A slice of a sequence, a transposed weight, a residual that is broadcast."""
    x, residual = torch.randn(rows, 4, 8, device=DEVICE)[:, 1], torch.randn(6, rows, device=DEVICE).t()
    weight, bias = torch.randn(8, 6, device=DEVICE).t(), torch.randn(6, device=DEVICE)
    with torch.no_grad():
        for one in (residual, residual[:1].expand(rows, 6), bias, None):
            found = by_kernels(x, weight, bias, one, "silu")
            torch.testing.assert_close(found, plain(x, weight, bias, one, "silu"), rtol=1e-4, atol=1e-5)


def test_where_something_learns_few_rows_take_no_kernel_of_their_own(few_rows: list[int]) -> None:
    """It leaves nothing for a backward pass."""
    x, weight, bias, _ = operands((3,))
    assert x is not None
    assert weight is not None
    by_kernels(x.detach(), weight, bias, None)
    by_kernels(x, weight.detach(), bias, None)
    assert not few_rows


@pytest.mark.parametrize("rows", [3, 70])
@with_and_without_bias
def test_under_autocast(rows: int, with_bias: bool) -> None:
    """Products in fewer bits, the gradients of weights in all of theirs."""
    x, weight, bias, residual = operands((rows,), with_bias=with_bias)
    inputs = [one for one in (x, weight, bias, residual) if one is not None]
    exact = plain(x, weight, bias, residual, "silu")  # type: ignore[arg-type]
    with torch.autocast(DEVICE.type, LOW):
        found, low = (one(x, weight, bias, residual, "silu") for one in (by_kernels, plain))  # type: ignore[arg-type]
        alone = [one(x, weight, bias, None) for one in (by_kernels, plain)]  # type: ignore[arg-type]
    assert found.dtype == low.dtype == torch.float32  # the residual's
    assert alone[0].dtype == alone[1].dtype == LOW
    torch.testing.assert_close(found, low, rtol=1e-2, atol=1e-2)
    grads, expected = (torch.autograd.grad(one.square().sum(), inputs) for one in (found, exact))
    for one, other in zip(grads, expected, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() <= 2e-2 * other.norm()


@pytest.mark.parametrize("rows", [1, 3, 70])
def test_without_gradients_under_autocast(rows: int, few_rows: list[int]) -> None:
    arguments = operands((rows,))
    with torch.no_grad(), torch.autocast(DEVICE.type, LOW):
        for residual in (None, arguments[3]):
            found, low = (one(*arguments[:3], residual, "gelu") for one in (by_kernels, plain))  # type: ignore[arg-type]
            assert found.dtype == low.dtype, "whichever kernel it is"
            torch.testing.assert_close(found, low, rtol=1e-2, atol=1e-2)
    assert bool(few_rows) == (rows < 70)


def test_weights_of_low_precision_have_gradients_of_it() -> None:
    arguments = [one.detach().to(LOW).requires_grad_() for one in operands((5,)) if one is not None]
    found, expected = (
        torch.autograd.grad(one(*arguments, "silu").float().sum(), arguments)
        for one in (by_kernels, plain)  # type: ignore[arg-type]
    )
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == LOW
        torch.testing.assert_close(one, other, rtol=1e-2, atol=1e-2)


def test_double_precision_takes_the_plain_path() -> None:
    arguments = [one.detach().double() for one in operands((5,)) if one is not None]
    assert torch.equal(by_kernels(*arguments, "silu"), plain(*arguments, "silu"))


def test_second_derivatives_are_refused() -> None:
    x, weight, bias, _ = operands((3,))
    out = by_kernels(x, weight, bias, None)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="do not support create_graph=True"):
        torch.autograd.grad(out.square().sum(), x, create_graph=True)  # type: ignore[arg-type]


def test_a_backward_pass_under_autocast_rounds_no_more() -> None:
    x, weight, bias, _ = operands((3,))
    losses = [by_kernels(x, weight, bias, None).square().sum() for _ in range(2)]  # type: ignore[arg-type]
    with torch.autocast(DEVICE.type, torch.bfloat16):
        inside = torch.autograd.grad(losses[0], [x, weight, bias])  # type: ignore[list-item]
    for one, other in zip(inside, torch.autograd.grad(losses[1], [x, weight, bias]), strict=True):  # type: ignore[list-item]
        assert torch.equal(one, other)


def test_layers_compute_by_it() -> None:
    x = torch.randn(5, 8, device=DEVICE)
    for layer in (Linear(8, 6), Linear(8, 6, bias=False), scaled_linear(8, 6), identity_linear(8)):
        layer.to(DEVICE)
        expected = layer(x)
        with kernels(True):
            torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(identity_linear(8).to(DEVICE)(x), x)
