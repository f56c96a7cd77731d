"""The delta rule by kernels equals plain torch in float64: values and gradients. Without a GPU, in the interpreter."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from logdepth import MemoryLayer
from logdepth.ops import DeltaChunk, delta_chunks, delta_rule_kernel, kernels
from tests.kernel_numbers import DEVICE

FLOAT, LOW = torch.float32, torch.bfloat16
NAMES = ("matrices", "outputs", "queries", "vectors", "log_decay", "strength")
SHAPES = [(1, 4, 3), (5, 16, 16), (16, 12, 40), (21, 24, 16), (32, 64, 32), (37, 16, 100), (64, 64, 64), (64, 128, 128)]
"""Tokens of a chunk, key width, value width."""


def random_chunks(
    size: int,
    key_width: int,
    value_width: int,
    *,
    chunks: int = 1,
    heads: int = 2,
    dtype: torch.dtype = FLOAT,
    log_decay: float | None = None,
) -> list[Tensor]:
    """Vectors, log α and β from 0 to 2, in memory as a layer has them."""
    vectors = torch.randn(chunks, size, heads, 2 * key_width + value_width).to(DEVICE, dtype)
    decay = -torch.rand(chunks, size, heads) if log_decay is None else torch.full((chunks, size, heads), log_decay)
    strength = 2 * torch.rand(chunks, size, heads)
    return [one.to(DEVICE).transpose(1, 2).requires_grad_() for one in (vectors, decay, strength)]


def run(tensors: list[Tensor], key_width: int, grads: list[Tensor], *, by_kernels: bool) -> list[Tensor]:
    """Results, and gradients of what goes in."""
    with kernels(by_kernels):
        found = delta_chunks(*tensors, key_width)
    given = [grad.to(one.dtype) for one, grad in zip(found, grads, strict=True)]
    return [*found, *torch.autograd.grad(found, tensors, given)]


def random_grads(tensors: list[Tensor], key_width: int) -> list[Tensor]:
    with torch.no_grad(), kernels(False):
        return [torch.randn_like(one) for one in delta_chunks(*tensors, key_width)]


def error(found: Tensor, expected: Tensor) -> float:
    """Relative to all numbers together: where much is erased, small ones are differences of large ones."""
    assert found.isfinite().all()
    assert found.shape == expected.shape
    return ((found.double() - expected).norm() / expected.norm().clamp_min(1e-30)).item()


def assert_exact(tensors: list[Tensor], key_width: int, values: float = 2e-6, gradients: float = 1e-5) -> None:
    grads = random_grads(tensors, key_width)
    found = run(tensors, key_width, grads, by_kernels=True)
    exact = run([one.detach().double().requires_grad_() for one in tensors], key_width, grads, by_kernels=False)
    for number, (name, one, other) in enumerate(zip(NAMES, found, exact, strict=True)):
        assert error(one, other) < (values if number < 3 else gradients), name
    for one, given in zip(found[3:], tensors, strict=True):
        assert one.dtype == given.dtype


@pytest.mark.parametrize(("size", "key_width", "value_width"), SHAPES)
def test_float32(size: int, key_width: int, value_width: int) -> None:
    assert_exact(random_chunks(size, key_width, value_width, chunks=2 if size < 64 else 1), key_width)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("size", "key_width", "value_width"), [(21, 24, 16), (64, 64, 64)])
def test_low_precision_is_rounded_to_tf32(size: int, key_width: int, value_width: int, dtype: torch.dtype) -> None:
    """Gradients of vectors in bfloat16 are rounded to it. The interpreter does not cut off operands."""
    assert_exact(random_chunks(size, key_width, value_width, dtype=dtype), key_width, 1e-3, 4e-3)


def test_float32_is_rounded_where_torch_may(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = random_chunks(16, 16, 16)
    grads = random_grads(tensors, 16)
    exact = run(tensors, 16, grads, by_kernels=True)
    monkeypatch.setattr(torch.backends.cuda.matmul, "fp32_precision", "tf32")
    rounded = run(tensors, 16, grads, by_kernels=True)
    assert all(1e-5 < error(one, other.double()) < 5e-3 for one, other in zip(rounded, exact, strict=True))


@pytest.mark.parametrize("log_decay", [0.0, -1e-4, -10.0, -2e4])
@pytest.mark.parametrize("dtype", [FLOAT, LOW])
def test_however_much_decays(log_decay: float, dtype: torch.dtype) -> None:
    """Also where keys repeat, so that I + A is far from the identity, and where decays underflow."""
    tensors = random_chunks(64, 16, 16, dtype=dtype, heads=1, log_decay=log_decay)
    tensors[0] = tensors[0].detach()[:, :, torch.arange(64) % 3].requires_grad_()
    assert_exact(tensors, 16, *((2e-6, 2e-3) if dtype == FLOAT else (3e-3, 2e-2)))


def test_keys_and_queries_of_zero_length() -> None:
    tensors = random_chunks(21, 16, 16)
    with torch.no_grad():
        tensors[0][:, :, ::3] = 0
        tensors[0][:, 1] = 0
    assert_exact(tensors, 16)


def test_padding_is_inert() -> None:
    tensors = random_chunks(21, 16, 16)
    padded = [torch.cat([one, torch.zeros_like(one[:, :, :9])], dim=2).detach() for one in tensors]
    with kernels():
        found, expected = delta_chunks(*padded, 16), delta_chunks(*tensors, 16)
    assert torch.equal(found.matrices, expected.matrices)
    assert torch.equal(found.outputs[:, :, :21], expected.outputs)
    assert torch.equal(found.queries[:, :, :21], expected.queries)
    assert not found.outputs[:, :, 21:].any()


def strided(tensors: list[Tensor]) -> list[Tensor]:
    """The same numbers, far apart in memory, vectors with strides of 3."""
    apart = [one.detach().new_zeros(*one.shape, 3) for one in tensors]
    for one, given in zip(apart, tensors, strict=True):
        one[..., 1] = given.detach()
    return [one[..., 1].requires_grad_() for one in apart]


def test_any_strides() -> None:
    tensors = random_chunks(21, 16, 24, chunks=2)
    grads = random_grads(tensors, 16)
    expected = run(tensors, 16, grads, by_kernels=True)
    turned = [one.detach().transpose(-1, -2).contiguous().transpose(-1, -2) for one in grads]
    for found in (run(strided(tensors), 16, grads, by_kernels=True), run(tensors, 16, turned, by_kernels=True)):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    given = [one[:1, :1, :1].expand_as(one) for one in grads]
    expected, found = (run(tensors, 16, one, by_kernels=True) for one in ([one.clone() for one in given], given))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_what_a_model_makes_is_not_copied() -> None:
    """Results and gradients lie in memory as tokens do."""
    tensors = random_chunks(16, 16, 16, chunks=2)
    found = run(tensors, 16, random_grads(tensors, 16), by_kernels=True)
    for one in (found[1], *found[3:]):
        assert one.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", [FLOAT, LOW])
def test_the_same_bits_each_time(dtype: torch.dtype) -> None:
    tensors = random_chunks(37, 32, 16, dtype=dtype)
    grads = random_grads(tensors, 32)
    first, second = (run(tensors, 32, grads, by_kernels=True) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("which", range(3))
def test_one_result_alone_has_gradients(which: int) -> None:
    tensors = random_chunks(16, 16, 16)
    with kernels():
        found = delta_chunks(*tensors, 16)[which].square().sum()
    with kernels(False):
        expected = delta_chunks(*tensors, 16)[which].square().sum()
    pairs = [torch.autograd.grad(one, tensors, allow_unused=True, materialize_grads=True) for one in (found, expected)]
    for one, other in zip(*pairs, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def launched(tensors: list[Tensor], key_width: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the kernel was taken."""
    calls: list[int] = []
    original = delta_rule_kernel.chunk
    monkeypatch.setattr(delta_rule_kernel, "chunk", lambda *given, **more: (calls.append(1), original(*given, **more)))
    with kernels():
        found = delta_chunks(*tensors, key_width)
    assert isinstance(found, DeltaChunk)
    return bool(calls)


@pytest.mark.parametrize(
    ("size", "key_width", "value_width", "taken"),
    [(16, 8, 8, True), (65, 8, 8, False), (2, 129, 8, False), (2, 8, 129, False), (2, 128, 8, True), (2, 8, 128, True)],
)
def test_which_shapes_have_kernels(
    size: int, key_width: int, value_width: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert launched(random_chunks(size, key_width, value_width), key_width, monkeypatch) == taken


def test_which_dtypes_have_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = random_chunks(3, 8, 8)
    double = [one.detach().double() for one in tensors]
    assert launched(tensors, 8, monkeypatch)
    assert not launched(double, 8, monkeypatch)
    assert not launched([tensors[0], *double[1:]], 8, monkeypatch)


def test_no_chunks() -> None:
    tensors = [one[:0] for one in random_chunks(3, 8, 4)]
    with kernels():
        found = delta_chunks(*tensors, 8)
    assert [one.shape for one in found] == [(0, 2, 8, 12), (0, 2, 3, 4), (0, 2, 3, 8)]


def test_second_derivatives_are_refused() -> None:
    tensors = random_chunks(3, 8, 4)
    with kernels():
        found = delta_chunks(*tensors, 8)
    with pytest.raises(RuntimeError, match=r"kernels\(False\)"):
        torch.autograd.grad(found.outputs.sum(), tensors, create_graph=True)


@pytest.mark.parametrize("reading", ["levels", "fold"])
def test_a_layer_by_kernels_is_the_plain_one(reading: Any) -> None:
    """Whole chunks, which are not copied; padded rows; and a state."""
    layer = MemoryLayer(12, heads=2, chunk=4, reading=reading, write_strength=2).to(DEVICE)
    exact = copy.deepcopy(layer).double()
    x = torch.randn(2, 16, 12, device=DEVICE)
    for lengths in (None, [13, 6]):
        results = []
        for one, dtype in ((layer, FLOAT), (exact, torch.float64)):
            given = x.to(dtype).requires_grad_()
            with kernels():
                y, state = one.step(given, one.init_state(2), lengths=lengths)
                more, _ = one.step(given[:, :3], state)
            y = torch.cat([y[0, :6], y[1, :6], *more])
            results.append([y, *torch.autograd.grad(y.sin().sum(), [given, *one.parameters()])])
        for found, expected in zip(*results, strict=True):
            assert error(found, expected) < 2e-5
