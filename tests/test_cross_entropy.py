"""The head's cross-entropy in chunks, with and without its kernel, is the plain one: in values and gradients."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from logdepth.ops import cross_entropy, kernels
from logdepth.ops.cross_entropy import _linear_cross_entropy, _rows_of_a_chunk, linear_cross_entropy, token_losses
from logdepth.ops.dispatch import runnable_on
from tests.heads import assert_is_truth, head, truth

CPU = torch.device("cpu")

with_kernel = pytest.param(
    True, id="kernel", marks=pytest.mark.skipif(not runnable_on(CPU), reason="needs Triton's interpreter")
)
plain_and_kernel = pytest.mark.parametrize("use_kernel", [pytest.param(False, id="torch"), with_kernel])


@plain_and_kernel
@pytest.mark.parametrize(
    ("rows", "vocab", "chunk_logits"),
    [
        (1, 1, 1),  # a vocabulary of one: no loss, no gradient
        (5, 37, 1),  # a row of logits is more than a chunk
        (10, 37, 3 * 37),  # the last chunk smaller
        (12, 37, 12 * 37),  # one chunk
        (300, 64, 128 * 64),  # tiles of rows, the last one uneven
        (3, 8000, 16000),
        (2, 9001, 9001),  # more columns than the kernel takes at once
    ],
)
def test_values_and_gradients_are_the_plain_ones(
    use_kernel: bool, rows: int, vocab: int, chunk_logits: int, chunks_of: Callable[[int], None]
) -> None:
    chunks_of(chunk_logits)
    features, weight, targets = head(rows, vocab)
    loss = _linear_cross_entropy(features, weight, targets, use_kernel=use_kernel)
    assert loss.dtype == torch.float32
    assert_is_truth(loss, features, weight, targets)


@given(rows=st.integers(1, 40), vocab=st.integers(1, 40), chunk_logits=st.integers(1, 2000), scale=st.floats(-3, 3))
def test_float64_is_exact_for_any_chunks(rows: int, vocab: int, chunk_logits: int, scale: float) -> None:
    features, weight, targets = head(rows, vocab, torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "CHUNK_LOGITS", chunk_logits)
        loss = linear_cross_entropy(features, weight, targets)
    assert loss.dtype == torch.float64
    expected = truth(features, weight, targets, scale)
    found = loss.detach(), *torch.autograd.grad(loss * scale, (features, weight))
    for one, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(one, exact, rtol=1e-10, atol=1e-12)


@plain_and_kernel
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(use_kernel: bool, dtype: torch.dtype, chunks_of: Callable[[int], None]) -> None:
    chunks_of(10 * 37)
    features, weight, targets = head(64, 37, dtype)
    loss = _linear_cross_entropy(features, weight, targets, use_kernel=use_kernel)
    assert loss.dtype == torch.float32
    assert_is_truth(loss, features, weight, targets, tolerance=1e-2)


@plain_and_kernel
def test_float16_keeps_gradients_that_a_scaled_loss_makes_large(
    use_kernel: bool, chunks_of: Callable[[int], None]
) -> None:
    """Divided by the number of rows too early, probabilities of 1e-5 would be nothing in float16."""
    chunks_of(128 * 5)
    features, weight, targets = head(512, 5, torch.float16)
    with torch.no_grad():
        features[:, 0] = 1
        weight.zero_()
        weight[1:, 0] = -11.5
    loss = _linear_cross_entropy(features, weight, torch.zeros_like(targets), use_kernel=use_kernel)
    assert_is_truth(loss, features, weight, torch.zeros_like(targets), scale=2.0**12, tolerance=1e-2)


@plain_and_kernel
def test_autocast(use_kernel: bool, chunks_of: Callable[[int], None]) -> None:
    chunks_of(10 * 37)
    features, weight, targets = head(64, 37)
    with torch.autocast("cpu", torch.bfloat16):
        loss = _linear_cross_entropy(features, weight, targets, use_kernel=use_kernel)
        plain = F.cross_entropy(F.linear(features, weight).float(), targets)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, plain, rtol=1e-5, atol=0)  # the logits are the same bfloat16 numbers
    assert_is_truth(loss, features, weight, targets, tolerance=1e-2)


def test_autocast_multiplies_in_its_dtype(chunks_of: Callable[[int], None]) -> None:
    chunks_of(10 * 37)
    features, weight, targets = head(64, 37)
    with torch.autocast("cpu", torch.bfloat16), Products() as products:
        linear_cross_entropy(features, weight, targets).backward()
    assert products.operands == {torch.bfloat16}


@plain_and_kernel
@pytest.mark.parametrize("learns", ["features", "weight"])
def test_one_gradient_alone(use_kernel: bool, learns: str, chunks_of: Callable[[int], None]) -> None:
    chunks_of(10 * 37)
    features, weight, targets = head(25, 37)
    _, features_grad, weight_grad = truth(features, weight, targets)
    features.requires_grad_(learns == "features")
    weight.requires_grad_(learns == "weight")
    with Products() as products:
        _linear_cross_entropy(features, weight, targets, use_kernel=use_kernel).backward()
    assert products.count == 2 * 3  # of each of three chunks: logits and one gradient
    expected, found = (features_grad, features) if learns == "features" else (weight_grad, weight)
    assert found.grad is not None
    torch.testing.assert_close(found.grad, expected.float())
    assert (weight if learns == "features" else features).grad is None


@plain_and_kernel
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_none_are_computed(
    use_kernel: bool, mode: Callable[[], Any], chunks_of: Callable[[int], None]
) -> None:
    chunks_of(10 * 37)
    features, weight, targets = head(25, 37)
    with mode(), Products() as products:
        loss = _linear_cross_entropy(features, weight, targets, use_kernel=use_kernel)
    assert not loss.requires_grad
    assert products.count == 3
    torch.testing.assert_close(loss.double(), truth(features, weight, targets)[0])


@plain_and_kernel
def test_large_logits_overflow_nothing(use_kernel: bool, chunks_of: Callable[[int], None]) -> None:
    chunks_of(10 * 37)
    features, weight, targets = head(25, 37)
    with torch.no_grad():
        features *= 1e4
    loss = _linear_cross_entropy(features, weight, targets, use_kernel=use_kernel)
    assert torch.isfinite(loss)
    assert_is_truth(loss, features, weight, targets, tolerance=1e-4)


@plain_and_kernel
def test_very_negative_logits_underflow_nothing(use_kernel: bool, chunks_of: Callable[[int], None]) -> None:
    chunks_of(10)
    features, weight = torch.ones(3, 1), torch.full((37, 1), -500.0)
    loss = _linear_cross_entropy(features, weight, torch.arange(3), use_kernel=use_kernel)
    torch.testing.assert_close(loss, torch.tensor(37.0).log())


@plain_and_kernel
def test_a_probable_token_after_many_improbable_ones(use_kernel: bool, chunks_of: Callable[[int], None]) -> None:
    """The largest logit comes last, in a block of its own, after blocks that weigh nothing beside it."""
    chunks_of(1)
    features, weight = torch.ones(1, 1, requires_grad=True), torch.full((16385, 1), -500.0)
    weight[-1] = 500
    weight.requires_grad_()
    targets = torch.tensor([16384])
    loss = _linear_cross_entropy(features, weight, targets, use_kernel=use_kernel)
    assert loss == 0
    loss = _linear_cross_entropy(features, weight, targets - 1, use_kernel=use_kernel)
    assert loss == 1000
    loss.backward()
    assert weight.grad is not None
    assert weight.grad[[0, -2, -1]].flatten().tolist() == [0, -1, 1]


@plain_and_kernel
def test_ignored_rows_do_not_count(use_kernel: bool, chunks_of: Callable[[int], None]) -> None:
    chunks_of(10 * 37)
    features, weight, targets = head(25, 37)
    targets[[0, 7, 24]] = cross_entropy.IGNORED
    loss = _linear_cross_entropy(features, weight, targets, use_kernel=use_kernel)
    assert_is_truth(loss, features, weight, targets)
    assert features.grad is not None
    assert not features.grad[[0, 7, 24]].any()


@pytest.mark.skipif(not runnable_on(CPU), reason="needs Triton's interpreter")
@pytest.mark.parametrize("wrong", [-1, 64])
def test_a_target_outside_the_vocabulary_shows_in_the_loss(wrong: int) -> None:
    """A GPU cannot raise without being waited for."""
    features, weight, targets = head(5, 64)  # its rows lie side by side: beyond one are another's logits
    targets[2] = wrong
    assert _linear_cross_entropy(features, weight, targets, use_kernel=True).isnan()


@pytest.mark.parametrize("wrong", [-1, 37])
@pytest.mark.parametrize("logits_at_once", [37, 10 * 37], ids=["chunks", "at once"])
def test_a_target_outside_the_vocabulary_is_refused_on_a_cpu(
    wrong: int, logits_at_once: int, chunks_of: Callable[[int], None]
) -> None:
    chunks_of(logits_at_once)
    features, weight, targets = head(5, 37)
    targets[2] = wrong
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        linear_cross_entropy(features, weight, targets)


@plain_and_kernel
def test_without_a_row_that_counts_there_is_no_mean_and_no_gradient(
    use_kernel: bool, chunks_of: Callable[[int], None]
) -> None:
    chunks_of(10 * 37)
    features, weight, targets = head(25, 37)
    loss = _linear_cross_entropy(features, weight, targets.fill_(cross_entropy.IGNORED), use_kernel=use_kernel)
    assert loss.isnan()
    for grad in torch.autograd.grad(loss, (features, weight)):
        assert not grad.any()


def test_targets_that_are_not_one_a_row_are_refused() -> None:
    features, weight, targets = head(5, 37)
    with pytest.raises(ValueError, match=r"features must be \[rows, width\]; got shape \(2, 3, 4\): flatten them"):
        linear_cross_entropy(torch.zeros(2, 3, 4), torch.zeros(7, 4), torch.zeros(2, dtype=torch.long))
    with pytest.raises(ValueError, match="5 rows of features need as many targets, not \\(4,\\)"):
        linear_cross_entropy(features, weight, targets[1:])


def test_backward_twice_gives_the_same(chunks_of: Callable[[int], None]) -> None:
    chunks_of(10 * 37)
    features, weight, targets = head(25, 37)
    loss = linear_cross_entropy(features, weight, targets)
    first = torch.autograd.grad(loss * 3, (features, weight), retain_graph=True)
    second = torch.autograd.grad(loss * 3, (features, weight))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)


def test_few_logits_can_be_differentiated_twice_and_many_say_that_they_cannot(
    chunks_of: Callable[[int], None],
) -> None:
    features, weight, targets = head(4, 5, torch.float64)
    torch.autograd.gradgradcheck(lambda *both: linear_cross_entropy(*both, targets), (features, weight))
    chunks_of(10)
    loss = linear_cross_entropy(features, weight, targets)
    with pytest.raises(RuntimeError, match="does not support create_graph=True"):
        torch.autograd.grad(loss, features, create_graph=True)


def test_transforms_take_the_plain_way(chunks_of: Callable[[int], None]) -> None:
    chunks_of(10)
    features, weight, targets = head(4, 5, torch.float64)
    grad = torch.func.grad(linear_cross_entropy)(features.detach(), weight.detach(), targets)
    torch.testing.assert_close(grad, truth(features, weight, targets)[1])


@pytest.mark.filterwarnings("default")  # the compiler warns of its own insides
def test_compiled_code_computes_the_same(chunks_of: Callable[[int], None]) -> None:
    chunks_of(10 * 37)
    features, weight, targets = head(25, 37)
    torch.compiler.reset()
    compiled = torch.compile(lambda one, other: linear_cross_entropy(one * 2, other, targets) * 3, backend="aot_eager")
    loss = compiled(features, weight)
    loss.backward()
    exact = [one.detach().double().requires_grad_() for one in (features, weight)]
    expected = F.cross_entropy(F.linear(exact[0] * 2, exact[1]), targets) * 3
    expected.backward()
    torch.testing.assert_close(loss.double(), expected)
    for one, other in zip((features, weight), exact, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-6)


@plain_and_kernel
def test_no_tensor_holds_all_logits(use_kernel: bool, chunks_of: Callable[[int], None]) -> None:
    rows, vocab = 1024, 100
    chunks_of(128 * vocab)
    features, weight, targets = head(rows, vocab)
    with Sizes() as sizes:
        _linear_cross_entropy(features, weight, targets, use_kernel=use_kernel).backward()
    assert sizes.largest == 4 * 128 * 128  # a chunk, its rows padded to 128 columns: an eighth of all logits
    with Sizes() as sizes:
        F.cross_entropy(F.linear(features, weight), targets).backward()
    assert sizes.largest == 4 * rows * vocab  # so the measure sees them


@given(rows=st.integers(1, 2**20), vocab=st.integers(1, 2**18))
def test_chunks_are_few_and_equal(rows: int, vocab: int) -> None:
    chunk = _rows_of_a_chunk(rows, vocab)
    assert 1 <= chunk <= rows
    assert chunk * vocab <= cross_entropy.CHUNK_LOGITS
    assert chunk == rows or chunk % cross_entropy.ROW_TILE == 0
    number = -(-rows // chunk)
    assert (number - 1) * (chunk - cross_entropy.ROW_TILE) < rows  # one tile of rows less in each would not do


@pytest.mark.parametrize(("vocab", "chunk"), [(1500, 16384), (8000, 8192), (50000, 1280), (2**27, 1)])
def test_chunks_of_the_usual_batch(vocab: int, chunk: int) -> None:
    assert _rows_of_a_chunk(32 * 512, vocab) == chunk


@plain_and_kernel
@pytest.mark.parametrize("chunk_logits", [1, 10 * 37, 10**6], ids=["rows", "chunks", "at once"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_losses_of_tokens(
    use_kernel: bool, chunk_logits: int, dtype: torch.dtype, chunks_of: Callable[[int], None]
) -> None:
    chunks_of(chunk_logits)
    features, weight, targets = head(25, 37, dtype)
    targets[[0, 7, 24]] = cross_entropy.IGNORED
    expected = F.cross_entropy(F.linear(features.double(), weight.double()), targets, reduction="none")
    with kernels(use_kernel):
        losses = token_losses(features, weight, targets)
        mean = linear_cross_entropy(features, weight, targets)
    assert losses.dtype == torch.float32
    assert not losses.requires_grad
    assert losses[[0, 7, 24]].tolist() == [0.0] * 3
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(losses.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(losses.sum() / 22, mean, rtol=1e-4, atol=0.0)


def test_losses_of_tokens_of_double_precision_are_exact(chunks_of: Callable[[int], None]) -> None:
    features, weight, targets = head(25, 37, torch.float64)
    expected = F.cross_entropy(F.linear(features, weight), targets, reduction="none").detach()
    for chunk_logits in (1, 10 * 37, 10**6):
        chunks_of(chunk_logits)
        with kernels(True):  # which have fewer bits
            torch.testing.assert_close(token_losses(features, weight, targets), expected, rtol=1e-12, atol=1e-12)


@plain_and_kernel
def test_losses_of_tokens_under_autocast(use_kernel: bool, chunks_of: Callable[[int], None]) -> None:
    chunks_of(10 * 37)
    features, weight, targets = head(25, 37)
    with torch.autocast("cpu", torch.bfloat16), kernels(use_kernel):
        losses = token_losses(features, weight, targets)
        logits = F.linear(features, weight).float()
    assert losses.dtype == torch.float32
    torch.testing.assert_close(losses, F.cross_entropy(logits, targets, reduction="none"), rtol=1e-5, atol=1e-6)


@plain_and_kernel
def test_no_rows_have_no_losses(use_kernel: bool) -> None:
    features, weight, targets = head(0, 37)
    with kernels(use_kernel):
        assert token_losses(features, weight, targets).shape == (0,)
        assert linear_cross_entropy(features, weight, targets).isnan()


def test_losses_of_tokens_need_a_target_a_row() -> None:
    features, weight, targets = head(5, 37)
    with pytest.raises(ValueError, match="5 rows of features need as many targets, not \\(4,\\)"):
        token_losses(features, weight, targets[1:])


@pytest.mark.skipif(not runnable_on(CPU), reason="needs Triton's interpreter")
def test_the_scope_of_kernels_decides(chunks_of: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    chunks_of(10 * 37)
    features, weight, targets = head(25, 37)
    used: list[bool] = []
    original = cross_entropy._losses_in_chunks

    def watched(features: Tensor, weight: Tensor, targets: Tensor, use_kernel: bool, *learn: bool) -> Any:
        used.append(use_kernel)
        return original(features, weight, targets, use_kernel, *learn)

    monkeypatch.setattr(cross_entropy, "_losses_in_chunks", watched)
    for enabled in (True, False, None):
        with kernels(enabled):
            linear_cross_entropy(features, weight, targets)
            token_losses(features, weight, targets)
    assert used == [True, True, False, False, False, False]


def test_triton_is_imported_only_where_it_is_used() -> None:
    code = (
        "import sys, torch; from logdepth.ops import cross_entropy; cross_entropy.CHUNK_LOGITS = 8; "
        "cross_entropy.linear_cross_entropy(torch.ones(4, 2), torch.ones(5, 2), torch.zeros(4).long()); "
        "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


class Products(TorchDispatchMode):
    """What matrix products were made."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.operands: set[torch.dtype] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._opname in {"mm", "addmm"}:
            self.count += 1
            self.operands |= {one.dtype for one in args[-2:]}
        return func(*args, **(kwargs or {}))


class Sizes(TorchDispatchMode):
    """Bytes of the largest tensor that was made."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, Tensor):
                self.largest = max(self.largest, one.nbytes)
        return made
