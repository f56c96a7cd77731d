"""Fused kernels and compiled code for a model, in training and wherever it is timed."""

import torch
from torch import nn

from logdepth.models import LanguageModel, ScanLM, num_parameters


def make_faster(model: LanguageModel, *, accelerate: bool, compiled: bool, any_length: bool = False) -> str | None:
    """Fused kernels and compiled code, as asked for; why there are no fused kernels, if so.

    Code is compiled for each shape that comes, or once for `any_length`.
    """
    reason = model.accelerate() if accelerate else None
    fused = accelerate and reason is None and isinstance(model, ScanLM)
    if compiled and not fused:  # fused operators are compiled already
        torch.compiler.reset()  # what ran before in this process would count against the model's recompilations
        compile_model(model, any_length)
    return reason


def compile_model(model: LanguageModel, any_length: bool = False) -> None:
    """Compiles in place, so that the names of weights stay: the whole Transformer, or what a ScanLM is made of."""
    if isinstance(model, ScanLM):
        for layer in model.layers:
            operators = layer.operators()
            parts = [*(operators if isinstance(operators, tuple) else (operators,)), layer.embedding_net]
            for part in parts:
                assert isinstance(part, nn.Module)
                if num_parameters(part):  # there may be no net
                    part.compile(dynamic=True)
    else:
        dynamic = True if any_length else None
        model.compile(dynamic=dynamic)
        setattr(model, "loss", torch.compile(model.loss, dynamic=dynamic))  # noqa: B010  (it does without `forward`)
