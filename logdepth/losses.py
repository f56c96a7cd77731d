"""Cross-entropy of a linear head, without all its logits at once."""

from torch import Tensor
from torch.nn import functional as F


def linear_cross_entropy(features: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """Mean nats of `targets` `[rows]` under the logits `features · weightᵀ`, `[rows, width]` and `[vocab, width]`."""
    return F.cross_entropy(F.linear(features, weight).float(), targets)
