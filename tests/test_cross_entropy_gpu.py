"""The head's cross-entropy on a GPU: at sizes that interest, in a CUDA graph, and its memory."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from logdepth.ops import cross_entropy
from logdepth.ops.cross_entropy import linear_cross_entropy
from tests.heads import assert_is_truth, head, truth

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.mark.parametrize("vocab", [1, 37, 8000, 50257])
@pytest.mark.parametrize("chunk_logits", [300 * 8000, cross_entropy.CHUNK_LOGITS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_on_a_gpu(vocab: int, chunk_logits: int, dtype: torch.dtype, chunks_of: Callable[[int], None]) -> None:
    chunks_of(chunk_logits)
    features, weight, targets = head(1000, vocab, dtype, "cuda")
    targets[[3, 999]] = cross_entropy.IGNORED
    loss = linear_cross_entropy(features, weight, targets)
    tolerance = {torch.float64: 1e-10, torch.float32: 5e-5}.get(dtype, 2e-2)
    assert_is_truth(loss, features, weight, targets, scale=3.0, tolerance=tolerance)


@pytest.mark.parametrize("chunk_logits", [128 * 8000, cross_entropy.CHUNK_LOGITS])
def test_autocast_on_a_gpu(chunk_logits: int, chunks_of: Callable[[int], None]) -> None:
    chunks_of(chunk_logits)
    features, weight, targets = head(1000, 8000, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = linear_cross_entropy(features, weight, targets)
        plain = F.cross_entropy(F.linear(features, weight).float(), targets)
    torch.testing.assert_close(loss, plain, rtol=1e-3, atol=0)
    assert_is_truth(loss, features, weight, targets, tolerance=2e-2)


def test_a_cuda_graph_holds_it(chunks_of: Callable[[int], None]) -> None:
    """Captured once, replayed on other numbers: nothing waits for the GPU, nothing depends on what it computes."""
    chunks_of(128 * 500)
    features, weight, targets = head(300, 500, device="cuda")

    def both() -> tuple[Tensor, ...]:
        loss = linear_cross_entropy(features, weight, targets)
        return loss.detach(), *torch.autograd.grad(loss * 2, (features, weight))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        both()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = both()
    others = head(300, 500, device="cuda")
    with torch.no_grad():
        for one, other in zip((features, weight, targets), others, strict=True):
            one.copy_(other)
    graph.replay()
    expected = truth(features, weight, targets, 2.0)
    for one, exact in zip(found, expected, strict=True):
        assert (one.double() - exact).norm() <= 1e-4 * exact.norm()


def test_memory_on_a_gpu() -> None:
    rows, vocab, width = 8192, 50000, 64
    features = torch.randn(rows, width, device="cuda", requires_grad=True)
    weight = torch.randn(vocab, width, device="cuda", requires_grad=True)
    targets = torch.randint(vocab, (rows,), device="cuda")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.autocast("cuda", torch.bfloat16):
        linear_cross_entropy(features, weight, targets).backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 3 * 2 * cross_entropy.CHUNK_LOGITS  # all logits in bfloat16 would be 6 chunks of them
