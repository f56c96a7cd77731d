"""Norms by kernels equal torch's own, alone and after a linear map; a modified layer calls its parts."""

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("triton")

from logdepth.blocks.paper_layer import EmbeddingNet
from logdepth.ops import Casts, LayerNorm, Linear, NormedLinear, RMSNorm, kernels, layer_norm, norm_named, using_casts
from logdepth.ops import norm as norms
from tests.fused_models import (
    DEVICE,
    few_programs,  # noqa: F401
    on_gpu,
    reproducible_products,  # noqa: F401
    shaken,
)

WIDTH = 8
EPS = 0.1
SHAPES = [(1,), (7,), (2, 5), (0,), (2, 0)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
with_and_without_skip = pytest.mark.parametrize("with_skip", [True, False], ids=["skip", "no-skip"])
with_and_without_activation = pytest.mark.parametrize("activation", ["silu", None])


def random(*shape: int) -> Tensor:
    return torch.randn(*shape).to(DEVICE).requires_grad_()


def plain_norm(
    x: Tensor, scale: Tensor | None, shift: Tensor | None, skip: Tensor | None = None, activation: str | None = None
) -> Tensor:
    out = F.layer_norm(x, x.shape[-1:], scale, shift, EPS)
    out = out if skip is None else out + skip
    return F.silu(out) if activation == "silu" else out


def assert_alike(actual: Tensor, expected: Tensor, learnt: list[Tensor], tolerance: float = 1e-4) -> None:
    """Values, and gradients of what is learnt."""
    assert actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    grad = torch.randn_like(expected)
    found, wanted = (torch.autograd.grad(y, learnt, grad, retain_graph=True) for y in (actual, expected))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=10 * tolerance, atol=tolerance)


# LayerNorm


@every_shape
@with_and_without_skip
@with_and_without_activation
def test_layer_norm(shape: tuple[int, ...], with_skip: bool, activation: Any) -> None:
    x, skip, scale, shift = random(*shape, WIDTH), random(*shape, WIDTH), random(WIDTH), random(WIDTH)
    given = skip if with_skip else None
    with kernels(True):
        found = layer_norm(x, scale, shift, EPS, skip=given, activation=activation)
    learnt = [x, scale, shift, *([skip] if with_skip else [])]
    assert_alike(found, plain_norm(x, scale, shift, given, activation), learnt)


def test_rows_may_lie_apart() -> None:
    x, skip, scale, shift = random(5, 3, WIDTH), random(WIDTH, 5), random(WIDTH), random(WIDTH)
    with kernels(True):
        found = layer_norm(x[:, 1], scale, shift, EPS, skip=skip.t(), activation="silu")
        turned = layer_norm(skip.t(), scale, shift, EPS)
    assert_alike(found, plain_norm(x[:, 1], scale, shift, skip.t(), "silu"), [x, skip, scale, shift])
    assert_alike(turned, plain_norm(skip.t(), scale, shift), [skip, scale, shift])


@with_and_without_skip
def test_layer_norm_under_autocast_is_as_exact_as_the_result_of_products(with_skip: bool) -> None:
    x, skip, scale, shift = random(7, WIDTH), random(7, WIDTH), random(WIDTH), random(WIDTH)
    given = skip if with_skip else None
    with kernels(True), torch.autocast(DEVICE.type, torch.bfloat16):
        found = layer_norm(x, scale, shift, EPS, skip=given, activation="silu")
    assert found.dtype == torch.bfloat16
    learnt = [x, scale, shift, *([skip] if with_skip else [])]
    assert_alike(found.float(), plain_norm(x, scale, shift, given, "silu"), learnt, 2e-2)


def test_layer_norm_without_kernels() -> None:
    x, skip, scale, shift = (one.detach().double() for one in (random(5, 8), random(5, 8), random(8), random(8)))
    expected = plain_norm(x, scale, shift, skip, "silu")
    for enabled in (True, False):  # which do not compute in double precision
        with kernels(enabled):
            found = layer_norm(x, scale, shift, EPS, skip=skip, activation="silu")
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"elementwise_affine": False}, {"bias": False}], ids=str)
def test_layer_norm_as_a_layer(options: dict[str, bool]) -> None:
    norm, x, skip = LayerNorm(WIDTH, eps=EPS, **options), random(5, WIDTH), random(5, WIDTH)
    shaken(norm.to(DEVICE))
    for enabled in (True, False):
        with kernels(enabled):
            found = norm(x, skip=skip, activation="silu")
        assert_alike(found, plain_norm(x, norm.weight, norm.bias, skip, "silu"), [x, skip, *norm.parameters()])


def test_rms_norm_has_the_dtype_of_products() -> None:
    norm, x = norm_named("rms", WIDTH).to(DEVICE), random(5, WIDTH)
    assert type(norm) is RMSNorm
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    for enabled in (True, False):
        with kernels(enabled):
            torch.testing.assert_close(norm(x), expected)
            with torch.autocast(DEVICE.type, torch.bfloat16):
                low = norm(x)
        assert low.dtype == torch.bfloat16
        torch.testing.assert_close(low.float(), expected, rtol=1e-2, atol=1e-2)
    assert type(norm_named("layer", WIDTH)) is LayerNorm


# A linear map and a norm


def layer_of(in_width: int = WIDTH, out_width: int = 6) -> NormedLinear:
    layer = NormedLinear(in_width, out_width)
    layer[1].eps = EPS
    shaken(layer)
    return layer.to(DEVICE)


def plain_layer(layer: nn.Module, x: Tensor, skip: Tensor | None = None, activation: str | None = None) -> Tensor:
    linear, norm = layer.children()
    return plain_norm(F.linear(x, linear.weight, linear.bias), norm.weight, norm.bias, skip, activation)


@every_shape
@with_and_without_skip
@with_and_without_activation
def test_normed_linear(shape: tuple[int, ...], with_skip: bool, activation: Any) -> None:
    layer, x, skip = layer_of(), random(*shape, WIDTH), random(*shape, 6)
    given = skip if with_skip else None
    learnt = [x, *layer.parameters(), *([skip] if with_skip else [])]
    for enabled in (True, False):
        with kernels(enabled):
            found = layer(x, skip=given, activation=activation)
        assert ("_NormedLinear" in str(found.grad_fn.next_functions)) == enabled
        assert_alike(found, plain_layer(layer, x, given, activation), learnt)


def test_normed_linear_of_rows_that_lie_apart() -> None:
    layer, x, skip = layer_of(), random(5, 3, WIDTH), random(6, 5)
    with kernels(True):
        found = layer(x[:, 1], skip=skip.t(), activation="silu")
    assert_alike(found, plain_layer(layer, x[:, 1], skip.t(), "silu"), [x, skip, *layer.parameters()])


def test_normed_linear_without_gradients() -> None:
    layer, x, skip = layer_of(), random(5, WIDTH), random(5, 6)
    expected = layer(x, skip=skip, activation="silu")
    for mode in (torch.no_grad, torch.inference_mode):
        with mode(), kernels(True):
            found = layer(x, skip=skip, activation="silu")
        assert not found.requires_grad
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_frozen_weights_pass_gradients_on() -> None:
    layer, x, skip = layer_of().requires_grad_(False), random(5, WIDTH), random(5, 6)
    with kernels(True):
        assert not layer(x.detach(), skip=skip.detach()).requires_grad
        found = layer(x, skip=skip, activation="silu")
    assert_alike(found, plain_layer(layer, x, skip, "silu"), [x, skip])


@pytest.mark.parametrize("at_hand", [False, True], ids=["own-casts", "casts-at-hand"])
def test_normed_linear_under_autocast(at_hand: bool) -> None:
    layer, x, skip = layer_of(16, 16), random(7, 16), random(7, 16)
    learnt = [x, skip, *layer.parameters()]
    with kernels(True), torch.autocast(DEVICE.type, torch.bfloat16):
        with using_casts(Casts(layer.parameters(), torch.bfloat16) if at_hand else None):
            found = layer(x, skip=skip, activation="silu")
        with kernels(False):
            low = layer(x, skip=skip, activation="silu")
    assert found.dtype == torch.bfloat16
    exact = plain_layer(layer, x, skip, "silu")
    with torch.no_grad():
        assert (found - exact).norm() < 1e-2 * exact.norm() + 1.5 * (low - exact).norm() < 0.1 * exact.norm()
    grads, expected = (torch.autograd.grad(one.float().square().sum(), learnt) for one in (found, exact))
    for one, other in zip(grads, expected, strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() <= 4e-2 * other.norm()


def test_double_precision_takes_the_plain_path() -> None:
    layer, x = layer_of().double(), random(5, WIDTH).detach().double()
    with kernels(True):
        found = layer(x, activation="silu")
    torch.testing.assert_close(found, plain_layer(layer, x, None, "silu"), rtol=1e-12, atol=1e-12)


def test_second_derivatives_are_refused() -> None:
    layer, x = layer_of(), random(5, WIDTH)
    for one in (layer, layer_of(WIDTH, WIDTH)[1]):
        with kernels(True):
            loss = one(x).square().sum()
        with pytest.raises(RuntimeError, match="do not support create_graph=True"):
            torch.autograd.grad(loss, x, create_graph=True)


class Other(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def doubled(_module: nn.Module, _inputs: Any, result: Tensor) -> Tensor:
    return 2 * result


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.__setitem__(0, nn.Linear(WIDTH, WIDTH)),
        lambda layer: layer.__setitem__(0, Other(WIDTH, WIDTH)),
        lambda layer: layer.__setitem__(0, nn.Identity()),
        lambda layer: layer.__setitem__(0, Linear(WIDTH, WIDTH, bias=False)),
        lambda layer: layer.__setitem__(1, nn.LayerNorm(WIDTH, eps=2.0)),
        lambda layer: layer.__setitem__(1, nn.RMSNorm(WIDTH)),
        lambda layer: layer.__setitem__(1, LayerNorm(WIDTH, bias=False)),
        lambda layer: layer[0].register_forward_hook(doubled),
        lambda layer: layer[1].register_forward_hook(doubled),
        lambda layer: layer[1].register_forward_pre_hook(lambda _module, inputs: (inputs[0] + 1,)),
        lambda layer: setattr(layer[0], "forward", lambda x: F.linear(x, -layer[0].weight, layer[0].bias)),
    ],
    ids=[
        "torch's linear", "subclass", "no map", "no bias", "torch's norm", "other norm", "norm without bias",
        "hook on the map", "hook on the norm", "pre-hook", "own forward",
    ],
)  # fmt: skip
def test_a_modified_layer_calls_its_parts(change: Callable[[NormedLinear], Any]) -> None:
    layer, x, skip = layer_of(WIDTH, WIDTH), random(5, WIDTH), random(5, WIDTH)
    change(layer)
    shaken(layer.to(DEVICE))
    linear, norm = layer
    learnt = [x, skip, *layer.parameters()]
    with kernels(True):
        found = layer(x, skip=skip, activation="silu")
    with kernels(False):
        expected = F.silu(norm(linear(x)) + skip)
    assert_alike(found, expected, learnt)


def test_hooks_fire() -> None:
    layer, x = layer_of(), random(5, WIDTH)
    seen: list[str] = []
    layer.register_forward_hook(lambda *_: seen.append("layer"))
    layer[0].register_forward_hook(lambda *_: seen.append("linear"))
    layer[1].register_full_backward_hook(lambda *_: seen.append("norm, backward"))
    with kernels(True):
        layer(x).sum().backward()
    assert seen == ["linear", "layer", "norm, backward"]


# A net of such layers


def net_of(width: int = WIDTH) -> EmbeddingNet:
    net = EmbeddingNet(width)
    shaken(net)
    return net.to(DEVICE)


def gradients(net: EmbeddingNet, x: Tensor, grad: Tensor, *, by_kernels: bool) -> tuple[Tensor, ...]:
    """The net's value, and what flows back to its input and parameters."""
    x = x.clone().requires_grad_()
    with kernels(by_kernels), using_casts(Casts(net.parameters(), x.dtype)):
        value = net(x)
    return value, *torch.autograd.grad(value, [x, *net.parameters()], grad)


@pytest.mark.parametrize("num_rows", [0, 1, 7])
def test_a_net(num_rows: int) -> None:
    net, x = net_of(), torch.randn(num_rows, WIDTH, device=DEVICE)
    grad = torch.randn_like(x)
    given = grad.clone()
    actual, expected = (gradients(net, x, given, by_kernels=one) for one in (True, False))
    assert torch.equal(given, grad)  # gradients are added in place, never to what came in
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    with torch.no_grad(), kernels(True):
        torch.testing.assert_close(net(x), actual[0])


def test_gradients_are_added_to_those_that_are_there() -> None:
    net, x = net_of(), torch.randn(3, WIDTH, device=DEVICE)
    once = gradients(net, x, torch.ones_like(x), by_kernels=True)[2:]
    for _ in range(2):
        with kernels(True):
            net(x).backward(torch.ones_like(x))
    for parameter, one in zip(net.parameters(), once, strict=True):
        torch.testing.assert_close(parameter.grad, 2 * one)


def test_what_comes_out_is_the_callers_own() -> None:
    """To overwrite it must not change what the backward pass reads."""
    net, x = net_of(), torch.randn(5, WIDTH, device=DEVICE)
    expected = gradients(net, x, torch.ones_like(x), by_kernels=True)[1:]
    moved = x.clone().requires_grad_()
    with kernels(True):
        out = net(moved)
    again = torch.autograd.grad(out.mul_(1.0), [moved, *net.parameters()], torch.ones_like(x))
    for one, other in zip(again, expected, strict=True):
        assert torch.equal(one, other)


def test_what_is_kept_may_be_elsewhere_meanwhile() -> None:
    net, x = net_of(), torch.randn(5, WIDTH, device=DEVICE)
    expected = gradients(net, x, torch.ones_like(x), by_kernels=True)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda one: one):
        actual = gradients(net, x, torch.ones_like(x), by_kernels=True)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


def test_without_a_backward_pass_values_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = net_of(), torch.randn(3, WIDTH, device=DEVICE)
    values: list[weakref.ref[Any]] = []
    alive: list[int] = []
    original = norms._normed

    def watched(*arguments: Any) -> Tensor:
        out = original(*arguments)
        values.append(weakref.ref(out.untyped_storage()))
        alive.append(sum(one() is not None for one in values))
        return out

    monkeypatch.setattr(norms, "_normed", watched)
    with torch.no_grad(), kernels(True):
        net(x)
    assert len(values) > 10
    assert max(alive) <= 4  # what is read, what is skipped to, what is made, and what its caller has not yet let go


@pytest.mark.parametrize(("num_rows", "width"), [(0, 32), (40, 32), pytest.param(4000, 256, marks=on_gpu)])
def test_gradients_in_low_precision_are_near(num_rows: int, width: int) -> None:
    net, x = net_of(width), torch.randn(num_rows, width, device=DEVICE)
    grad = torch.randn_like(x)
    expected = gradients(net, x, grad, by_kernels=False)
    for one, other in zip(gradients(net, x.bfloat16(), grad.bfloat16(), by_kernels=True), expected, strict=True):
        assert (one - other).norm() <= 8e-2 * other.norm()


@on_gpu
def test_on_a_gpu_a_graph_of_it_gives_the_same_each_time() -> None:
    net = net_of(256)
    copied = copy.deepcopy(net)
    x = torch.randn(3000, 256, device=DEVICE, dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    expected = gradients(copied, x, grad, by_kernels=True)
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm):
        gradients(net, x, grad, by_kernels=True)
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = gradients(net, x, grad, by_kernels=True)
    for _ in range(5):
        graph.replay()
        for one, other in zip(actual, expected, strict=True):
            assert (one - other).norm() < 1e-2 * other.norm()
