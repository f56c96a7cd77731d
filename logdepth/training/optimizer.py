"""The optimizer of a model, its learning rate at each step, and its state by parameter name."""

import math
from typing import Protocol

import torch
from torch import Tensor, nn

from logdepth.parallel import part_like
from logdepth.runs import TrainConfig
from logdepth.training.muon import Muon

FLOOR = 1e-3
"""The learning rate at the end of the schedule, as a share of its peak."""


class OptimizerConfig(Protocol):
    """The fields of a config that an optimizer reads; `TrainConfig` documents them."""

    @property
    def optimizer(self) -> str: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def betas(self) -> tuple[float, ...]: ...
    @property
    def muon_learning_rate(self) -> float | None: ...
    @property
    def muon_momentum(self) -> float: ...


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """The learning rate of a step, counted from 0.

    It rises linearly to its peak and falls to a thousandth of it: along a cosine over all steps after the warm-up, or
    with the schedule "wsd" linearly over the last of them.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    last, start = total_steps - 1, config.warmup_steps
    if config.schedule == "wsd":
        start = max(start, last - round(config.decay_fraction * total_steps))
    place = min(1.0, max(0, step - start) / max(1, last - start))
    height = 1 - place if config.schedule == "wsd" else 0.5 * (1 + math.cos(math.pi * place))
    return config.learning_rate * (FLOOR + (1 - FLOOR) * height)


class ModelOptimizer:
    """AdamW or AMSGrad for all weights of a model, or Muon for its hidden matrices and AdamW for the others.

    Weights with two dimensions or more decay; vectors do not.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self.model = model
        matrices = hidden_matrices(model) if config.optimizer == "muon" else []
        by_muon = set(matrices)
        others = [one for one in model.parameters() if one.requires_grad and one not in by_muon]
        groups = [
            {"params": [one for one in others if one.ndim >= 2], "weight_decay": config.weight_decay},
            {"params": [one for one in others if one.ndim < 2], "weight_decay": 0.0},
        ]
        betas = (config.betas[0], config.betas[1])
        amsgrad = config.optimizer == "amsgrad"
        self.adamw = torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=True, amsgrad=amsgrad)
        self.muon: Muon | None = None
        if matrices:
            self.muon = Muon(
                matrices,
                weight_decay=config.weight_decay,
                momentum=config.muon_momentum,
                adjustment="match_rms_adamw",
            )
        self.muon_factor = (config.muon_learning_rate or config.learning_rate) / config.learning_rate
        """Muon's learning rate as a multiple of AdamW's."""

    def step(self, learning_rate: float | Tensor) -> None:
        """Updates the weights. A CUDA graph that captures this reads the learning rate's tensor at every replay."""
        in_graph = isinstance(learning_rate, Tensor) and learning_rate.is_cuda
        for group in self.adamw.param_groups:
            group["lr"] = learning_rate
            # Only AdamW's own check reads this: fused steps are the same either way.
            group["capturable"] = in_graph and torch.cuda.is_current_stream_capturing()
        self.adamw.step()
        if self.muon is not None:
            for group in self.muon.param_groups:
                group["lr"] = learning_rate * self.muon_factor
            self.muon.step()

    def zero_grad(self) -> None:
        self.model.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """The state, as `name of the parameter/name of the moment`."""
        return {
            f"{name}/{key}": value
            for name, parameter in self.model.named_parameters()
            for part in self._parts()
            for key, value in part.state.get(parameter, {}).items()
        }

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Sets the state to what `tensors` returned, on any device."""
        parameters = dict(self.model.named_parameters())
        owners = {one: part for part in self._parts() for group in part.param_groups for one in group["params"]}
        for full_name, value in tensors.items():
            name, key = full_name.rsplit("/", 1)
            parameter = parameters[name]
            owners[parameter].state[parameter][key] = part_like(value, parameter)

    def _parts(self) -> tuple[torch.optim.Optimizer, ...]:
        return (self.adamw,) if self.muon is None else (self.adamw, self.muon)


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """The weights with two dimensions or more, except those of embeddings and of the output head `model.head`."""
    ends = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    head = getattr(model, "head", None)  # None where the head is the embedding
    excluded = {one for module in (*ends, head) if module is not None for one in module.parameters()}
    return [one for one in model.parameters() if one.requires_grad and one.ndim >= 2 and one not in excluded]
