"""Layers as one node of the graph: values and gradients of the plain net; sums beside the rest are there in time."""

import contextlib
import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from logdepth.fused import layers as fused_layers
from logdepth.fused.beside import Beside
from logdepth.fused.casts import Casts
from logdepth.fused.layers import Layer, through_layers
from logdepth.models.embedding_net import EmbeddingNet
from tests.fused_models import (
    DEVICE,
    few_programs,  # noqa: F401
    on_gpu,
    reproducible_products,  # noqa: F401
    shaken,
)

WIDTH = 8


def net_of(width: int = WIDTH) -> EmbeddingNet:
    net = EmbeddingNet(width)
    shaken(net)
    return net.to(DEVICE)


def casts_of(net: nn.Module, dtype: torch.dtype = torch.float32) -> Casts:
    return Casts(net.parameters(), dtype)


def gradients(net: EmbeddingNet, x: Tensor, grad: Tensor, *, fused: bool) -> tuple[Tensor, ...]:
    """The net's value, and what flows back to its input and parameters."""
    x = x.clone().requires_grad_()
    value = net.fused(casts_of(net, x.dtype), x) if fused else net(x)
    return value, *torch.autograd.grad(value, [x, *net.parameters()], grad)


@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_a_net_as_one_node(num_rows: int) -> None:
    net, x = net_of(), torch.randn(num_rows, WIDTH, device=DEVICE)
    grad = torch.randn_like(x)
    expected = gradients(net, x, grad, fused=False)
    given = grad.clone()
    actual = gradients(net, x, given, fused=True)
    assert torch.equal(given, grad)  # gradients of skips are added in place, never to what came in
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(net.fused(casts_of(net), x), actual[0])


def test_a_value_that_is_read_three_times_and_an_end_without_a_norm() -> None:
    first, second, third = (nn.Linear(4, 4) for _ in range(3))
    norm = nn.LayerNorm(4)
    for module in (first, second, third, norm):
        shaken(module)
    whole = nn.ModuleList([first, second, third, norm]).to(DEVICE)
    chain = [Layer(first, None, 0), Layer(second, norm, 1, skip=1, silu=False), Layer(third, None, 1)]
    x = torch.randn(5, 4, device=DEVICE, requires_grad=True)
    unread = through_layers(casts_of(whole), chain, x)
    torch.testing.assert_close(unread, third(first(x)), rtol=1e-4, atol=1e-4)
    chain[2] = Layer(third, norm, 2, skip=1)
    inner = first(x)
    expected = nn.functional.silu(norm(third(norm(second(inner)) + inner)) + inner)
    actual = through_layers(casts_of(whole), chain, x)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    found, wanted = (torch.autograd.grad(y.square().sum(), [x, *whole.parameters()]) for y in (actual, expected))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_gradients_are_added_to_those_that_are_there() -> None:
    net, x = net_of(), torch.randn(3, WIDTH, device=DEVICE)
    once = gradients(net, x, torch.ones_like(x), fused=True)[2:]
    for _ in range(2):
        net.fused(casts_of(net), x).backward(torch.ones_like(x))
    for parameter, one in zip(net.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * one)


def test_without_a_backward_pass_no_value_is_kept_longer_than_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = net_of(), torch.randn(3, WIDTH, device=DEVICE)
    made: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    original = fused_layers.fill_normed

    def watched(mapped: Tensor, *others: Any, **settings: Any) -> None:
        made.append(weakref.ref(mapped))
        alive.append(sum(one() is not None for one in made))
        original(mapped, *others, **settings)

    monkeypatch.setattr(fused_layers, "fill_normed", watched)
    with torch.no_grad():
        net.fused(casts_of(net), x)
    assert max(alive) == 1
    alive.clear()
    made.clear()
    kept = net.fused(casts_of(net), x)
    assert max(alive) == len(made) > 10
    assert kept.requires_grad


def test_nothing_is_kept_where_nothing_learns() -> None:
    net, x = net_of().requires_grad_(False), torch.randn(3, WIDTH, device=DEVICE)
    assert not net.fused(casts_of(net), x).requires_grad
    moved = x.clone().requires_grad_()
    net.fused(casts_of(net), moved).sum().backward()
    expected = x.clone().requires_grad_()
    net(expected).sum().backward()
    torch.testing.assert_close(moved.grad, expected.grad, rtol=1e-4, atol=1e-4)


def test_beside_is_at_once_without_a_gpu() -> None:
    with Beside(torch.device("cpu")) as second, second.beside(torch.ones(1)):
        total = torch.ones(3).sum()
    assert total == 3


@on_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_sums_beside_the_rest_are_those_of_one_stream(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = net_of(256)
    x = torch.randn(4000, 256, device=DEVICE, dtype=dtype)
    grad = torch.randn_like(x)
    several = [gradients(net, x, grad, fused=True) for _ in range(20)]
    monkeypatch.setattr(fused_layers, "Beside", lambda _: Beside(torch.device("cpu")))
    one_stream = gradients(net, x, grad, fused=True)
    for outcome in several:
        for one, other in zip(outcome, one_stream, strict=True):
            near = 1e-4 if dtype == torch.float32 else 2e-2  # rows of few bits make sums of many as rough
            torch.testing.assert_close(one, other, rtol=near, atol=near * float(other.detach().abs().max()))


@on_gpu
def test_on_a_gpu_what_fails_beside_is_waited_for_too() -> None:
    """A capture that ends with work that nobody waits for would fail by that, and say nothing of the cause."""
    graph, number = torch.cuda.CUDAGraph(), torch.zeros(1, device=DEVICE)
    failing = contextlib.suppress(ZeroDivisionError)
    with torch.cuda.graph(graph), failing, Beside(number.device) as second, second.beside(number):
        number += 1
        raise ZeroDivisionError
    graph.replay()
    assert number.item() == 1


@on_gpu
def test_on_a_gpu_a_graph_of_it_gives_the_same_each_time() -> None:
    net = net_of(256)
    copied = copy.deepcopy(net)
    x = torch.randn(3000, 256, device=DEVICE, dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    expected = gradients(copied, x, grad, fused=True)
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        gradients(net, x, grad, fused=True)
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with Beside(x.device):
            pass  # where nothing was done beside, there is nothing to wait for
        actual = gradients(net, x, grad, fused=True)
    for _ in range(5):
        graph.replay()
        for one, other in zip(actual, expected, strict=True):
            assert (one - other).norm() < 1e-2 * other.norm()
