"""Muon: momentum whose every update is orthogonalised, for the hidden matrices of a network.

Keller Jordan's algorithm (https://kellerjordan.github.io/posts/muon/) as in torch.optim.Muon, with two differences. The
learning rate may be a tensor, which a CUDA graph reads at every replay. A weight with more than two dimensions is a
batch of matrices `[..., out, in]`.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from logdepth.parallel import local, part_like, whole

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic Newton–Schulz iteration: its slope at zero is as large as possible."""
ITERATIONS = 5
EPSILON = 1e-7
"""The smallest norm by which a matrix is divided."""
Adjustment = Literal["original", "match_rms_adamw"]


class Muon(torch.optim.Optimizer):
    """Muon with Nesterov momentum and decoupled weight decay. No step waits for the GPU.

    Args:
        lr: learning rate, a number or a tensor of one element on the device of the parameters.
        weight_decay: each step shrinks a weight by `lr * weight_decay` of its value.
        momentum: the weight of the past in the running mean of gradients.
        adjustment: how the shape of a matrix scales its learning rate. "original": by sqrt(max(1, out / in)).
            "match_rms_adamw": by 0.2 sqrt(max(out, in)), so that an update has the root mean square of a typical update
            of AdamW, whose learning rate and weight decay then carry over (https://arxiv.org/abs/2502.16982).
    """

    def __init__(
        self,
        params: Iterable[nn.Parameter],
        lr: float | Tensor = 1e-3,
        *,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        adjustment: Adjustment = "original",
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "adjustment": adjustment}
        super().__init__(params, defaults)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim < 2:
                    raise ValueError(f"Muon is for matrices; got a parameter of shape {tuple(parameter.shape)}")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _update(parameter, parameter.grad, self.state[parameter], **group)
        return loss


def _update(
    parameter: Tensor,
    gradient: Tensor,
    state: dict[str, Tensor],
    *,
    lr: float | Tensor,
    weight_decay: float,
    momentum: float,
    adjustment: Adjustment,
    **_: Any,
) -> None:
    if "momentum_buffer" not in state:
        state["momentum_buffer"] = torch.zeros_like(gradient)
    mean = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
    # The update of a matrix needs all of it. Where ranks have parts, each computes the whole, and keeps its part.
    update = part_like(orthogonalised(whole(gradient.lerp(mean, momentum))).to(parameter.dtype), parameter)
    shape, parameter, update = parameter.shape, local(parameter), local(update)
    # Filled on the device: a copy from the host would make a GPU wait.
    rate = lr if isinstance(lr, Tensor) else torch.full((), lr, device=parameter.device)
    parameter.mul_(1 - rate * weight_decay)
    parameter.addcmul_(update, rate, value=-_rate_factor(adjustment, shape))


def orthogonalised(matrices: Tensor) -> Tensor:
    """U S' Vᵀ of each matrix U S Vᵀ in `[..., out, in]`, in bfloat16; the numbers in S' are from about 0.5 to 1.5."""
    a, b, c = COEFFICIENTS
    add_product = torch.addmm if matrices.ndim == 2 else torch.baddbmm
    result = matrices.bfloat16() if matrices.ndim == 2 else matrices.bfloat16().flatten(0, -3)
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    if is_tall:  # the products with its transpose are the small ones
        result = result.mT
    result = result / result.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON)
    for _ in range(ITERATIONS):
        gram = result @ result.mT
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        result = add_product(result, polynomial, result, beta=a)
    return (result.mT if is_tall else result).reshape(matrices.shape)


def _rate_factor(adjustment: Adjustment, shape: torch.Size) -> float:
    rows, columns = shape[-2:]
    if adjustment == "original":
        return math.sqrt(max(1.0, rows / columns))
    return 0.2 * math.sqrt(max(rows, columns))
