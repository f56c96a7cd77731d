"""One optimizer step: windows of tokens and a learning rate in, the loss and the norm of the gradient out."""

import torch
from torch import Tensor, nn

from logdepth.data import document_bounds
from logdepth.ops.precision import arithmetic
from logdepth.runs import TrainConfig
from logdepth.training.optimizer import ModelOptimizer


class TrainingStep:
    """The gradients of all micro-batches, clipping, and the update of the weights.

    Without document boundaries its GPU work depends only on the shape of the windows, so a CUDA graph can capture it.

    Args:
        loss: a NextTokenLoss, which DDP, FSDP or torch.compile may wrap.
        separator: the token that ends a document, where documents are to be packed; None to read on across them.
    """

    def __init__(
        self, loss: nn.Module, optimizer: ModelOptimizer, config: TrainConfig, separator: int | None = None
    ) -> None:
        self.loss, self.optimizer, self.config, self.separator = loss, optimizer, config, separator
        self.parameters = list(loss.parameters())

    def __call__(self, windows: Tensor, learning_rate: float | Tensor) -> tuple[Tensor, Tensor]:
        """Trains on windows `[batch, context + 1]`; returns their mean loss and the gradient's norm before clipping."""
        self.optimizer.zero_grad()  # a capture that failed may have left gradients that are not finite
        loss = self._accumulate_gradients(windows)
        norm = nn.utils.clip_grad_norm_(self.parameters, self.config.clip)
        self.optimizer.step(learning_rate)
        self.optimizer.zero_grad()
        return loss, norm

    def _accumulate_gradients(self, windows: Tensor) -> Tensor:
        loss = torch.zeros((), device=windows.device)
        for micro_batch in torch.split(windows, self.config.micro_batch or len(windows)):
            share = self._loss(micro_batch) * (len(micro_batch) / len(windows))
            torch.autograd.backward(share)
            loss += share.detach()
        return loss

    def _loss(self, windows: Tensor) -> Tensor:
        inputs, targets = windows[:, :-1], windows[:, 1:]
        with arithmetic(self.config.precision, windows.device):
            if self.separator is None:
                loss: Tensor = self.loss(inputs, targets)
            else:
                bounds = document_bounds(inputs.cpu().numpy(), self.separator)
                loss = self.loss(inputs.flatten(), targets.flatten(), bounds)
        return loss
