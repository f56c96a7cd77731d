"""A memory by kernels is the plain one in float64: whole, packed, padded, split anywhere and token by token."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from logdepth import MemoryLayer
from logdepth.ops import block_reading_kernel, kernels
from tests.memory_chunks import DEVICE
from tests.small_models import shake
from tests.toy import boundaries

DIM = 32
LAYERS: dict[str, dict[str, Any]] = {
    "levels": {"heads": 2, "chunk": 16, "write_strength": 2},
    "odd-widths": {"heads": 1, "chunk": 2, "levels": 2, "key_width": 24, "value_width": 7, "conv": 0},
    "fold": {"heads": 2, "chunk": 16, "reading": "fold"},
    "summary": {"heads": 1, "chunk": 16, "summary": 4, "merge_gate": True},
}
every_layer = pytest.mark.parametrize("name", LAYERS)


def whole(layer: MemoryLayer, x: Tensor) -> Tensor:
    return layer(x)


def padded(layer: MemoryLayer, x: Tensor) -> Tensor:
    y = layer(x, lengths=[x.shape[1], 9])
    return torch.cat([y[0], y[1, :9]])


def packed(layer: MemoryLayer, x: Tensor) -> Tensor:
    bounds = boundaries([3, 0, x.shape[1], x.shape[1] - 3])
    return layer(x.flatten(0, 1), cu_seqlens=bounds)


def split(layer: MemoryLayer, x: Tensor) -> Tensor:
    """In the middle of chunks, with rows of different lengths."""
    first, state = layer.step(x[:, :5], layer.init_state(2), lengths=[5, 2])
    second, state = layer.step(x[:, 5:-1], state)
    third, _ = layer.step(x[:, -1:], state)
    return torch.cat([first[0], first[1, :2], second.flatten(0, 1), third.flatten(0, 1)])


def assert_close(layer: MemoryLayer, x: Tensor, run: Callable[[MemoryLayer, Tensor], Tensor]) -> None:
    """Values and gradients."""
    exact, x = copy.deepcopy(layer).double(), x.requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    with kernels(True):
        found = run(layer, x)
    expected = run(exact, exact_x)
    direction = torch.randn(expected.shape, dtype=torch.float64).to(DEVICE)
    grads = torch.autograd.grad(found, [x, *layer.parameters()], direction.float())
    exact_grads = torch.autograd.grad(expected, [exact_x, *exact.parameters()], direction)
    for one, other in zip((found, *grads), (expected, *exact_grads), strict=True):
        assert (one.double() - other).norm() <= 3e-5 * other.norm()


@every_layer
@pytest.mark.parametrize("run", [whole, padded, packed, split])
def test_values_and_gradients(name: str, run: Callable[[MemoryLayer, Tensor], Tensor]) -> None:
    layer = MemoryLayer(DIM, **LAYERS[name]).to(DEVICE)
    shake(layer, 0.2)
    length = 5 * layer.chunk + 3
    assert_close(layer, torch.randn(2, length, DIM, device=DEVICE), run)


@every_layer
def test_token_by_token(name: str) -> None:
    layer = MemoryLayer(DIM, **LAYERS[name]).to(DEVICE)
    shake(layer, 0.2)
    x = torch.randn(1, 35, DIM, device=DEVICE)
    with torch.no_grad():
        expected = copy.deepcopy(layer).double()(x.double())
        with kernels(True):
            ys, state = [], layer.init_state(1)
            for token in x.split(1, dim=1):
                y, state = layer.step(token, state)
                ys.append(y)
    assert (torch.cat(ys, dim=1).double() - expected).norm() <= 1e-5 * expected.norm()


def test_all_levels_are_read_by_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = block_reading_kernel.read
    monkeypatch.setattr(block_reading_kernel, "read", lambda *a, **b: calls.append(a) or original(*a, **b))
    layer, x = MemoryLayer(DIM, heads=1, chunk=4).to(DEVICE), torch.randn(1, 30, DIM, device=DEVICE)
    with kernels(True):
        layer(x)
    assert len(calls) == 1
    with kernels(False):
        layer(x)
    assert len(calls) == 1
    with kernels(True):  # no kernel reads summaries
        MemoryLayer(DIM, heads=1, chunk=4, summary=2).to(DEVICE)(x)
    assert len(calls) == 1
