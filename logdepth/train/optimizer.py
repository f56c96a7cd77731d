"""AdamW with weight decay on matrices alone, its learning rate at each step, and its state by parameter name."""

import math

import torch
from torch import Tensor, nn

from logdepth.runs import TrainConfig

LOWEST = 1e-3
"""The learning rate at the end of the cosine, over its peak."""


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """At `step`, counted from 0: linear from zero to the peak, then a cosine to a thousandth of it."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    span = max(1, total_steps - 1 - config.warmup_steps)
    place = min(1.0, (step - config.warmup_steps) / span)
    return config.learning_rate * (LOWEST + (1 - LOWEST) * 0.5 * (1 + math.cos(math.pi * place)))


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.AdamW:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    betas = (config.betas[0], config.betas[1])
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float | Tensor) -> None:
    """For the next step. One that is captured in a CUDA graph reads its tensor whenever it is replayed."""
    captured = isinstance(rate, Tensor) and rate.is_cuda and torch.cuda.is_current_stream_capturing()
    for group in optimizer.param_groups:
        group["lr"] = rate
        group["capturable"] = captured  # only the optimizer's own check reads it: fused steps are the same


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as `name of the parameter/name of the moment`."""
    return {
        f"{name}/{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }


def restore_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for full_name, value in tensors.items():
        name, key = full_name.rsplit("/", 1)
        parameter = parameters[name]
        optimizer.state[parameter][key] = value.to(parameter.device)
