"""Layers as one node of the graph: values and gradients of the plain net, those of several weights in one product."""

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton")

from logdepth.fused import layers as fused_layers
from logdepth.fused.layers import Batch, Layer, batches_of, places_of, through_layers
from logdepth.models.embedding_net import EmbeddingNet

from logdepth.ops.precision import Casts
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


def assert_alike(actual: Tensor, expected: Tensor, learnt: list[Tensor]) -> None:
    """Values, and gradients of what is learnt."""
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    found, wanted = (torch.autograd.grad(y.square().sum(), learnt) for y in (actual, expected))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


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
    assert_alike(through_layers(casts_of(whole), chain, x), expected, [x, *whole.parameters()])


def test_gradients_are_added_to_those_that_are_there() -> None:
    net, x = net_of(), torch.randn(3, WIDTH, device=DEVICE)
    once = gradients(net, x, torch.ones_like(x), fused=True)[2:]
    for _ in range(2):
        net.fused(casts_of(net), x).backward(torch.ones_like(x))
    for parameter, one in zip(net.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * one)


def test_without_a_backward_pass_no_value_is_kept_longer_than_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = net_of(), torch.randn(3, WIDTH, device=DEVICE)
    mapped: list[weakref.ref[Tensor]] = []
    values: list[weakref.ref[Any]] = []
    alive: list[tuple[int, int]] = []
    original = fused_layers.fill_normed

    def watched(one: Tensor, scale: Tensor, shift: Tensor, skip: Tensor | None, out: Tensor, **settings: Any) -> None:
        mapped.append(weakref.ref(one))
        values.append(weakref.ref(out.untyped_storage()))
        alive.append((sum(one() is not None for one in mapped), sum(one() is not None for one in values)))
        original(one, scale, shift, skip, out, **settings)

    def most_alive() -> tuple[int, int]:
        most_mapped, most_values = (max(counts) for counts in zip(*alive, strict=True))
        for found in (mapped, values, alive):
            found.clear()
        return most_mapped, most_values

    monkeypatch.setattr(fused_layers, "fill_normed", watched)
    with torch.no_grad():
        net.fused(casts_of(net), x)
    num_norms = len(mapped)
    assert num_norms > 10
    assert most_alive() == (1, 3)  # of values: what is read, what is skipped to, and what is made
    kept = net.fused(casts_of(net), x)
    assert most_alive() == (num_norms, num_norms)
    assert kept.requires_grad


def test_nothing_is_kept_where_nothing_learns() -> None:
    net, x = net_of().requires_grad_(False), torch.randn(3, WIDTH, device=DEVICE)
    assert not net.fused(casts_of(net), x).requires_grad
    moved = x.clone().requires_grad_()
    net.fused(casts_of(net), moved).sum().backward()
    expected = x.clone().requires_grad_()
    net(expected).sum().backward()
    torch.testing.assert_close(moved.grad, expected.grad, rtol=1e-4, atol=1e-4)


def layers_of(net: EmbeddingNet, monkeypatch: pytest.MonkeyPatch) -> dict[int, Layer]:
    """Those that a net hands over, as they are numbered."""
    handed: list[list[Layer]] = []
    monkeypatch.setattr(fused_layers, "through_layers", lambda _, layers, x: handed.append(layers) or x)
    net.fused(casts_of(net), torch.zeros(1, WIDTH, device=DEVICE))
    return dict(enumerate(handed[0], start=1))


def test_layers_of_one_shape_learn_together(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = layers_of(net_of(), monkeypatch)
    places = places_of(layers)
    batches = batches_of(layers, places)
    assert [batch for batch in batches if batch.read is None] == [Batch((number,), None) for number in (1, 6, 19)]
    together = {batch.numbers: batch.read for batch in batches if batch.read is not None}
    assert together == {
        (2, 3, 4, 5): slice(0, 4, 1),  # of the two blocks
        (7, 11, 14, 17): slice(0, 7, 2),  # of the bottlenecks
        (9, 12, 15, 18): slice(1, 8, 2),
        (10, 13, 16): slice(1, 4, 1),
    }
    for numbers, read in together.items():
        (width,) = {layers[number].linear.in_features for number in numbers}
        shelf = [number for number, place in places.items() if place.width == width]
        assert shelf[read] == [layers[number].source for number in numbers]


@pytest.mark.parametrize(
    ("sources", "together"),
    [((1, 2, 3), True), ((1, 3, 5), True), ((1, 2, 4), False), ((2, 2, 2), False), ((3, 2, 1), False)],
)
def test_layers_learn_alone_where_they_read_at_other_distances(sources: tuple[int, ...], together: bool) -> None:
    maps = nn.ModuleList(nn.Linear(4, 4) for _ in range(8))
    norms = nn.ModuleList(nn.LayerNorm(4) for _ in range(3))
    shaken(maps)
    shaken(norms)
    whole = nn.ModuleList([maps, norms]).to(DEVICE)
    # Five maps one after the other; then three of one shape that read some of them, each with what was before it added.
    chain = [Layer(maps[number], None, number) for number in range(5)]
    chain += [Layer(maps[5 + at], norms[at], source, skip=5 + at) for at, source in enumerate(sources)]
    layers = dict(enumerate(chain, start=1))
    assert (len(batches_of(layers, places_of(layers))) == 1) == together

    def plain(x: Tensor) -> Tensor:
        values = [x]
        for number in range(5):
            values.append(maps[number](values[-1]))
        for at, source in enumerate(sources):
            values.append(nn.functional.silu(norms[at](maps[5 + at](values[source])) + values[-1]))
        return values[-1]

    x = torch.randn(6, 4, device=DEVICE, requires_grad=True)
    assert_alike(through_layers(casts_of(whole), chain, x), plain(x), [x, *whole.parameters()])


def test_what_comes_out_is_the_callers_own() -> None:
    """To overwrite it must not change what the backward pass reads."""
    net, x = net_of(), torch.randn(5, WIDTH, device=DEVICE)
    expected = gradients(net, x, torch.ones_like(x), fused=True)[1:]
    moved = x.clone().requires_grad_()
    out = net.fused(casts_of(net), moved)
    again = torch.autograd.grad(out.mul_(1.0), [moved, *net.parameters()], torch.ones_like(x))
    for one, other in zip(again, expected, strict=True):
        assert torch.equal(one, other)


def test_other_widths_and_small_numbers_for_the_norms() -> None:
    first, last, norms = nn.Linear(6, 6), nn.Linear(6, 10), (nn.LayerNorm(6, eps=0.5), nn.LayerNorm(10, eps=2.0))
    whole = nn.ModuleList([first, last, *norms]).to(DEVICE)
    shaken(whole)
    x = torch.randn(4, 6, device=DEVICE, requires_grad=True)
    apart = torch.randn(6, 4, device=DEVICE).t().detach().requires_grad_()  # rows that do not lie side by side
    for given in (x, apart):
        inner = nn.functional.silu(norms[0](first(given)) + given)
        expected = norms[1](last(inner))
        layers = [Layer(first, norms[0], 0, skip=0), Layer(last, norms[1], 1, silu=False)]
        assert_alike(through_layers(casts_of(whole), layers, given), expected, [given, *whole.parameters()])


def test_what_is_kept_may_be_elsewhere_meanwhile() -> None:
    net, x = net_of(), torch.randn(5, WIDTH, device=DEVICE)
    expected = gradients(net, x, torch.ones_like(x), fused=True)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda one: one):
        actual = gradients(net, x, torch.ones_like(x), fused=True)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize(("num_rows", "width"), [(0, 32), (40, 32), pytest.param(4000, 256, marks=on_gpu)])
def test_gradients_in_low_precision_are_near(num_rows: int, width: int) -> None:
    net, x = net_of(width), torch.randn(num_rows, width, device=DEVICE)
    grad = torch.randn_like(x)
    expected = gradients(net, x, grad, fused=False)
    for one, other in zip(gradients(net, x.bfloat16(), grad.bfloat16(), fused=True), expected, strict=True):
        assert (one - other).norm() <= 8e-2 * other.norm()


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
        actual = gradients(net, x, grad, fused=True)
    for _ in range(5):
        graph.replay()
        for one, other in zip(actual, expected, strict=True):
            assert (one - other).norm() < 1e-2 * other.norm()
