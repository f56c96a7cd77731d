"""Where an op computes: scopes, threads, transforms, compiled code, devices and dtypes; and what backward passes
refuse."""

import importlib
import pkgutil
import threading
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

import logdepth.operators
import logdepth.ops
from logdepth import scan
from logdepth.operators import GRC
from logdepth.ops import NormedLinear, dispatch, kernels, layer_norm, norm_kernel, use_kernels, why_no_kernels
from logdepth.ops.dispatch import backward_by_kernels, runnable_on
from tests.fused_models import DEVICE, WIDTH

x = torch.zeros(2, WIDTH, device=DEVICE)
outside = DEVICE.type == "cuda"
"""Whether kernels are used where nobody asks: on a GPU."""


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows each launch of the norm's kernel had."""
    rows: list[int] = []
    original = norm_kernel.fill_normed

    def watched(one: Tensor, *arguments: object, **settings: object) -> None:
        rows.append(len(one))
        original(one, *arguments, **settings)  # type: ignore[arg-type]

    monkeypatch.setattr(norm_kernel, "fill_normed", watched)
    return rows


def normed(one: Tensor) -> Tensor:
    return layer_norm(one, torch.ones(WIDTH, device=DEVICE), torch.ones(WIDTH, device=DEVICE))


def test_scopes_nest_and_end_with_errors(launches: list[int]) -> None:
    assert use_kernels(x) == outside
    with kernels():
        assert use_kernels(x)
        with kernels(False):
            assert not use_kernels(x)
            normed(x)
            assert not launches
            with kernels(None):
                assert use_kernels(x) == outside
            with kernels(True):
                assert use_kernels(x)
                normed(x)
                assert launches == [2]
            assert not use_kernels(x)
        assert use_kernels(x)
        with pytest.raises(KeyError), kernels(False):
            raise KeyError
        assert use_kernels(x)
    assert use_kernels(x) == outside


def test_a_scope_is_its_threads_own() -> None:
    seen: list[bool] = []

    def look() -> None:
        seen.append(use_kernels(x))
        with kernels(False):
            entered.set()
            left.wait()

    entered, left = threading.Event(), threading.Event()
    with kernels(True):
        thread = threading.Thread(target=look)
        thread.start()
        entered.wait()
        assert use_kernels(x)
        left.set()
        thread.join()
        assert use_kernels(x)
    assert seen == [outside]


def test_a_backward_pass_needs_no_scope(launches: list[int]) -> None:
    """It follows the forward pass, in a thread of its own on a GPU."""
    one = torch.randn(3, WIDTH, device=DEVICE, requires_grad=True)
    grads = []
    for during_forward, during_backward in ((True, False), (False, True), (False, False)):
        with kernels(during_forward):
            loss = normed(one).square().sum()
        with kernels(during_backward):
            grads += torch.autograd.grad(loss, one)
    assert launches == [3]
    for grad in grads[1:]:
        torch.testing.assert_close(grads[0], grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64])
def test_dtypes_without_kernels(dtype: torch.dtype) -> None:
    with kernels(True):
        assert not use_kernels(x.to(dtype))
    assert f"float32 at most; this tensor is {dtype}" in str(why_no_kernels(x.to(dtype)))


@pytest.mark.parametrize("dtype", dispatch.DTYPES)
def test_dtypes_with_kernels(dtype: torch.dtype) -> None:
    with kernels(True):
        assert use_kernels(x.to(dtype))
    assert why_no_kernels(x.to(dtype)) is None


def test_devices_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = torch.zeros(2, WIDTH)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with kernels(True):
        assert not use_kernels(on_cpu)
        torch.testing.assert_close(layer_norm(on_cpu, None, None), on_cpu)
    assert why_no_kernels(on_cpu) == "kernels need a CUDA GPU and Triton; this device is cpu"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why_no_kernels(on_cpu) is None
    assert runnable_on(torch.device("cuda"))
    monkeypatch.setattr(dispatch, "_triton_is_installed", lambda: False)
    for device in ("cuda", "cpu"):
        assert not runnable_on(torch.device(device))


def test_transforms_take_the_plain_path(launches: list[int]) -> None:
    one = torch.randn(3, WIDTH, device=DEVICE)
    layer = NormedLinear(WIDTH, WIDTH).to(DEVICE)
    with kernels(True):
        slopes = torch.func.jacrev(normed)(one)
        hessian = torch.func.hessian(lambda row: normed(row).square().sum())(one[:1])
        mapped = torch.func.vmap(lambda row: layer(normed(row)))(one)
        assert not launches
        assert why_no_kernels(one) is None
        _, state = scan(GRC(WIDTH).to(DEVICE), one[None])
        tangent = torch.func.jvp(normed, (one,), (one,))[1]
    with kernels(False):
        torch.testing.assert_close(mapped, layer(normed(one)), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(slopes, torch.autograd.functional.jacobian(normed, one), rtol=1e-4, atol=1e-5)
        expected = torch.autograd.functional.hessian(lambda row: normed(row).square().sum(), one[:1])
        torch.testing.assert_close(hessian, expected, rtol=1e-3, atol=1e-4)
        expected = torch.autograd.functional.jvp(normed, one, one)[1]
        torch.testing.assert_close(tangent, expected, rtol=1e-3, atol=1e-4)
    assert state.blocks.shape[0] == 2


def test_inside_a_transform_there_is_a_reason() -> None:
    reasons: list[str | None] = []
    torch.func.grad(lambda one: (reasons.append(why_no_kernels(one)), one.sum())[1])(x)
    assert reasons == ["kernels do not support torch.func transforms"]


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.filterwarnings("default")  # the compiler warns of its own insides
def test_compiled_code_takes_the_plain_path(launches: list[int]) -> None:
    """It has kernels of its own, and can be differentiated."""
    layer, one = NormedLinear(WIDTH, WIDTH).to(DEVICE), torch.randn(3, WIDTH, device=DEVICE, requires_grad=True)

    def twice(one: Tensor) -> Tensor:
        return layer(normed(one), skip=one, activation="silu") * 2

    with kernels(False):
        expected = twice(one)
    with kernels(True):
        found = torch.compile(twice, backend="aot_eager", fullgraph=True)(one)
        assert not launches
        assert use_kernels(one)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    grads = (torch.autograd.grad(out.square().sum(), [one, *layer.parameters()]) for out in (found, expected))
    for found_grad, grad in zip(*grads, strict=True):
        torch.testing.assert_close(found_grad, grad, rtol=1e-4, atol=1e-4)


def modules_of(package: ModuleType) -> list[ModuleType]:
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [importlib.import_module(one.name) for one in found]


def test_every_backward_pass_by_kernels_refuses_second_derivatives() -> None:
    """Gradients of gradients would be wrong without notice where the second pass asks for some tensors only."""
    every = {
        value
        for module in (*modules_of(logdepth.ops), *modules_of(logdepth.operators))
        for value in vars(module).values()
        if isinstance(value, type) and issubclass(value, torch.autograd.Function)
    }
    assert {one.__name__ for one in every} >= {"_FusedScan", "_Linear", "_NormedLinear", "_Rows", "_LinearCrossEntropy"}
    for function in every:
        with pytest.raises(RuntimeError, match="not support create_graph=True"):
            function.backward(None, None)


def test_a_backward_pass_by_kernels_is_outside_autocast() -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, one: Tensor) -> Tensor:
            return 2 * one

        @staticmethod
        @backward_by_kernels
        def backward(ctx: object, grad: Tensor) -> Tensor:
            seen.append(torch.is_autocast_enabled(DEVICE.type))
            return 2 * grad

    seen: list[bool] = []
    one = torch.ones(2, device=DEVICE, requires_grad=True)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        Double.apply(one).sum().backward()  # type: ignore[no-untyped-call]
    assert seen == [False]
    assert one.grad is not None
    assert one.grad.tolist() == [2.0, 2.0]
