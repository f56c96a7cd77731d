"""Merges without gradients, by kernels: the answers of the plain modules, whatever the rows, widths and dtypes."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from logdepth import ScanState, scan
from logdepth.operators import GRC, GRCConfig, MLPLDRUConfig, PostMerge, PostMergeConfig
from logdepth.operators.fused import inference as of_net
from logdepth.operators.grc import inference as of_grc
from logdepth.ops import ACTIVATIONS, ActivationName, Casts, few_rows_kernel, kernels, using_casts
from logdepth.ops.few_rows_kernel import MAX_ROWS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
# The interpreter multiplies tiles of bfloat16 as if they were whole numbers.
LOW = torch.bfloat16 if DEVICE.type == "cuda" else torch.float16
ROWS = [1, 3, 8, 9, 16, 33, 64, MAX_ROWS + 1]
every_number_of_rows = pytest.mark.parametrize("num_rows", ROWS)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(DEVICE, dtype)


def unusual(module: nn.Module) -> None:
    """Biases that are not zero, scales that are not one."""
    for name, weight in module.named_parameters():
        if weight.ndim == 1:
            nn.init.normal_(weight, mean=float("norm.weight" in name), std=0.3)


def merging(
    width: int, *, net: bool, activation: ActivationName = "silu", eps: float = 1e-5, dropout: float = 0.0
) -> GRC | PostMerge:
    operator: GRC | PostMerge = GRCConfig(width=width, activation=activation, dropout=dropout).build()
    if net:
        operator = PostMergeConfig(width=width, activation=activation, dropout=dropout).build(operator)
        operator.operator.norm.eps = 0.2  # type: ignore[union-attr]
    operator.norm.eps = eps
    unusual(operator)
    return operator.to(DEVICE)


@pytest.fixture
def merged_rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each merge by kernels had, and each net after one."""
    rows: list[int] = []

    def watch(module: Any, name: str) -> None:
        original: Callable[..., Tensor] = getattr(module, name)

        def watched(operator: nn.Module, left: Tensor, *right: Tensor) -> Tensor:
            rows.append(len(left))
            return original(operator, left, *right)

        monkeypatch.setattr(module, name, watched)

    watch(of_grc, "merged_by_kernels")
    watch(of_net, "refined_by_kernels")
    return rows


@torch.no_grad()
def by_kernels(operator: nn.Module, left: Tensor, right: Tensor) -> Tensor:
    with kernels(True):
        return operator(left, right)  # type: ignore[no-any-return]


@torch.no_grad()
def plain(operator: nn.Module, left: Tensor, right: Tensor) -> Tensor:
    with kernels(False):
        return operator(left, right)  # type: ignore[no-any-return]


def close(actual: Tensor, expected: Tensor, tolerance: float = 2e-5) -> None:
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@every_number_of_rows
@pytest.mark.parametrize("width", [8, 48, 64])
@pytest.mark.parametrize("net", [False, True], ids=["alone", "net"])
def test_merges_are_the_modules(num_rows: int, width: int, net: bool, merged_rows: list[int]) -> None:
    operator = merging(width, net=net, eps=0.1)
    left, right = random(num_rows, width), random(num_rows, width)
    close(by_kernels(operator, left, right), plain(operator, left, right))
    assert merged_rows == [num_rows] * (1 + net)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("num_rows", [1, 2, MAX_ROWS + 1])
def test_every_activation(activation: ActivationName, num_rows: int) -> None:
    operator = merging(16, net=True, activation=activation)
    left, right = random(num_rows, 16), random(num_rows, 16)
    close(by_kernels(operator, left, right), plain(operator, left, right))


@pytest.mark.parametrize("num_rows", [1, 2, 20])
def test_long_sums_are_taken_in_parts(num_rows: int) -> None:
    operator = merging(300, net=True)
    left, right = random(num_rows, 300), random(num_rows, 300)
    close(by_kernels(operator, left, right), plain(operator, left, right), 1e-4)


@pytest.mark.parametrize("states", [torch.float32, LOW])
@pytest.mark.parametrize("at_hand", [False, True], ids=["own-casts", "casts-at-hand"])
@every_number_of_rows
def test_under_autocast(num_rows: int, at_hand: bool, states: torch.dtype, merged_rows: list[int]) -> None:
    """Products in fewer bits; states in their own dtype, which is that of the answer."""
    operator = merging(64, net=True)
    left, right = random(num_rows, 64), random(num_rows, 64)
    casts = Casts((one for one in operator.parameters() if one.ndim == 2), LOW) if at_hand else None
    with torch.autocast(DEVICE.type, LOW), using_casts(casts):
        merged = by_kernels(operator, left.to(states), right.to(states))
    assert merged.dtype == states
    close(merged, plain(operator, left, right), 0.06)
    assert merged_rows == [num_rows] * 2


@pytest.mark.parametrize("num_rows", [1, MAX_ROWS + 1] if DEVICE.type == "cpu" else ROWS)
def test_under_autocast_to_bfloat16(num_rows: int) -> None:
    operator = merging(64, net=True)
    left, right = random(num_rows, 64), random(num_rows, 64)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        merged = by_kernels(operator, left, right)
    assert merged.dtype == torch.float32
    close(merged, plain(operator, left, right), 0.1)


@pytest.mark.parametrize("net", [False, True], ids=["alone", "net"])
def test_no_rows(net: bool) -> None:
    assert by_kernels(merging(8, net=net), random(0, 8), random(0, 8)).shape == (0, 8)


@pytest.mark.parametrize("num_rows", [1, 5, MAX_ROWS + 1])
def test_operands_may_lie_apart(num_rows: int) -> None:
    operator = merging(16, net=True)
    left, right = random(num_rows, 3, 16)[:, 1], random(16, num_rows).t()
    close(by_kernels(operator, left, right), plain(operator, left, right))


@pytest.mark.parametrize("num_rows", [1, 5, MAX_ROWS + 1])
def test_operands_are_left_as_they_were(num_rows: int) -> None:
    operator = merging(16, net=True)
    left, right = random(num_rows, 16), random(num_rows, 16)
    before = left.clone(), right.clone()
    by_kernels(operator, left, right)
    assert torch.equal(left, before[0])
    assert torch.equal(right, before[1])


@pytest.mark.parametrize("num_rows", [1, 5, MAX_ROWS + 1])
def test_a_net_after_another_operator(num_rows: int, merged_rows: list[int]) -> None:
    operator = PostMergeConfig(width=16).build(MLPLDRUConfig(width=16).build())
    unusual(operator.to(DEVICE))
    left, right = random(num_rows, 16), random(num_rows, 16)
    close(by_kernels(operator, left, right), plain(operator, left, right))
    assert merged_rows == [num_rows]


def test_where_gradients_are_wanted_modules_merge(merged_rows: list[int]) -> None:
    operator = merging(8, net=True)
    left, right = random(3, 8).requires_grad_(), random(3, 8).requires_grad_()
    outs = []
    for enabled in (True, False):
        with kernels(enabled):
            outs.append(operator(left, right))
    assert not merged_rows
    inputs = [left, right, *operator.parameters()]
    for one, other in zip(*(torch.autograd.grad(out.square().sum(), inputs) for out in outs), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_dropout_that_is_on_drops(merged_rows: list[int]) -> None:
    operator = merging(8, net=True, dropout=0.5)
    left, right = random(5, 8), random(5, 8)
    assert not torch.equal(by_kernels(operator, left, right), by_kernels(operator, left, right))
    assert not merged_rows
    operator.eval()
    close(by_kernels(operator, left, right), plain(operator, left, right))
    assert merged_rows == [5, 5]


def test_double_precision_takes_the_plain_path(merged_rows: list[int]) -> None:
    operator = merging(8, net=True).double()
    left, right = random(5, 8).double(), random(5, 8).double()
    assert torch.equal(by_kernels(operator, left, right), plain(operator, left, right))
    assert not merged_rows


def test_scans_that_kernels_cannot_sweep_still_merge_by_them(merged_rows: list[int]) -> None:
    """Such as a scan with two operators."""
    up, down = merging(8, net=False), merging(8, net=False)
    elements, state = random(2, 5, 8), ScanState.empty(2, 8, device=DEVICE)
    with torch.no_grad():
        expected = scan((up, down), elements, state).prefixes
        with kernels(True):
            close(scan((up, down), elements, state).prefixes, expected)
    assert merged_rows


@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_residuals_of_few_rows_have_their_own_dtype(num_rows: int) -> None:
    """A product in low precision, added to a row in float32."""
    x, weight, bias = random(num_rows, 16, dtype=LOW), random(8, 16, dtype=LOW), random(8, dtype=LOW)
    residual, out = random(num_rows, 8), torch.empty(num_rows, 8, device=DEVICE)
    few_rows_kernel.linear([x], weight, bias, out, residual=residual)
    close(out, nn.functional.linear(x.float(), weight.float(), bias.float()) + residual, 1e-3)
