"""The loss of a language model, as a module."""

from torch import Tensor, nn

from logdepth.models import LanguageModel
from logdepth.scanning import LengthsLike


class NextTokenLoss(nn.Module):
    """Mean cross-entropy of a model's predictions of the next token, in nats.

    Its `forward` is all that a training step differentiates, so DDP, FSDP and torch.compile can wrap it as a module.
    """

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor, cu_seqlens: LengthsLike | None = None) -> Tensor:
        """Inputs and targets are `[batch, length]`, or packed documents `[total]` that start at `cu_seqlens`."""
        return self.model.loss(inputs, targets, cu_seqlens=cu_seqlens)
