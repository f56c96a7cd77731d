"""Fused kernels and compiled code for a model, in training and wherever it is timed."""

import torch
from torch import nn

from logdepth.models import LanguageModel, ScanLM, num_parameters
from logdepth.train.next_token_loss import NextTokenLoss


def make_faster(
    module: LanguageModel | NextTokenLoss, *, accelerate: bool, compiled: bool, any_length: bool = False
) -> str | None:
    """Turns on the fused kernels and the compiled code asked for; returns why there are no fused kernels, if so.

    Code is compiled for each shape that comes, or once for `any_length`.
    """
    model = module.model if isinstance(module, NextTokenLoss) else module
    reason = model.accelerate() if accelerate else None
    fused = accelerate and reason is None and isinstance(model, ScanLM)
    if compiled and not fused:  # fused operators are compiled already
        torch.compiler.reset()  # earlier compilations in this process would count against the model's limit
        compile_model(module, any_length)
    return reason


def compile_model(module: LanguageModel | NextTokenLoss, any_length: bool = False) -> None:
    """Compiles in place, so that weights keep their names: operators and nets of a ScanLM, all of a Transformer."""
    model = module.model if isinstance(module, NextTokenLoss) else module
    if isinstance(model, ScanLM):
        for layer in model.layers:
            operators = layer.operators()
            parts = [*(operators if isinstance(operators, tuple) else (operators,)), layer.embedding_net]
            for part in parts:
                assert isinstance(part, nn.Module)
                if num_parameters(part):  # there may be no net
                    part.compile(dynamic=True)
        return
    dynamic = True if any_length else None
    model.compile(dynamic=dynamic)
    if isinstance(module, NextTokenLoss):
        module.compile(dynamic=dynamic)
    else:  # whoever times a model calls its loss
        setattr(model, "loss", torch.compile(model.loss, dynamic=dynamic))  # noqa: B010
