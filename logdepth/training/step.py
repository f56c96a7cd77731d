"""One optimizer step: windows of tokens and a learning rate in, the loss and the norm of the gradient out."""

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from logdepth.data import document_bounds
from logdepth.ops.precision import arithmetic
from logdepth.parallel import Shared, whole
from logdepth.runs import TrainConfig
from logdepth.training.optimizer import ModelOptimizer


class TrainingStep:
    """The gradients of all micro-batches, clipping, and the update of the weights.

    Without document boundaries its GPU work depends only on the shape of the windows, so a CUDA graph can capture it.

    Args:
        loss: a NextTokenLoss, which torch.compile may wrap, or one that ranks share.
        separator: the token that ends a document, where documents are to be packed; None to read on across them.
    """

    def __init__(
        self, loss: nn.Module | Shared, optimizer: ModelOptimizer, config: TrainConfig, separator: int | None = None
    ) -> None:
        self.shared = loss if isinstance(loss, Shared) else None
        self.loss = loss.loss if isinstance(loss, Shared) else loss
        self.optimizer, self.config, self.separator = optimizer, config, separator
        self.parameters = list(self.loss.parameters())
        self.seed_of_row: Callable[[int], int] | None = None
        """The seed of the micro-batch that starts at a row, for all but the first. By default, dropout draws on."""

    def __call__(self, windows: Tensor, learning_rate: float | Tensor) -> tuple[Tensor, Tensor]:
        """Trains on windows `[batch, context + 1]`; returns their mean loss and the gradient's norm before clipping.

        Where ranks share the batch, the windows and the loss are this rank's, and the gradient is that of all.
        """
        self.optimizer.zero_grad()  # a capture that failed may have left gradients that are not finite
        loss = self._accumulate_gradients(windows)
        norm = whole(nn.utils.clip_grad_norm_(self.parameters, self.config.clip))
        self.optimizer.step(learning_rate)
        self.optimizer.zero_grad()
        return loss, norm

    def _accumulate_gradients(self, windows: Tensor) -> Tensor:
        loss = torch.zeros((), device=windows.device)
        row = 0
        for micro_batch in torch.split(windows, self.config.micro_batch or len(windows)):
            if row and self.seed_of_row is not None:
                torch.manual_seed(self.seed_of_row(row))
            row += len(micro_batch)
            with self.shared.accumulating(is_last=row == len(windows)) if self.shared else nullcontext():
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
