"""What tests of a head's cross-entropy share: heads, and the truth about them in float64."""

import torch
from torch import Tensor
from torch.nn import functional as F

WIDTH = 16


def head(rows: int, vocab: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> tuple[Tensor, ...]:
    """Features, a weight and targets, with logits of a few nats."""
    features = torch.randn(rows, WIDTH, dtype=torch.float64)
    weight = torch.randn(vocab, WIDTH, dtype=torch.float64) / 2
    targets = torch.randint(vocab, (rows,))
    return (
        features.to(device, dtype).requires_grad_(),
        weight.to(device, dtype).requires_grad_(),
        targets.to(device),
    )


def truth(features: Tensor, weight: Tensor, targets: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients in float64."""
    exact = [one.detach().double().requires_grad_() for one in (features, weight)]
    loss = F.cross_entropy(F.linear(*exact), targets)
    return loss.detach(), *torch.autograd.grad(loss * scale, exact)


def assert_is_truth(
    loss: Tensor, features: Tensor, weight: Tensor, targets: Tensor, *, scale: float = 1.0, tolerance: float = 1e-5
) -> None:
    """Gradients are compared by norm: what counts of a rounding error is how it adds up."""
    expected = truth(features, weight, targets, scale)
    (loss * scale).backward()
    assert features.grad is not None
    assert weight.grad is not None
    assert features.grad.dtype == features.dtype
    assert weight.grad.dtype == weight.dtype
    for one, exact in zip((loss.detach(), features.grad, weight.grad), expected, strict=True):
        assert (one.double() - exact).norm() <= tolerance * exact.norm()
