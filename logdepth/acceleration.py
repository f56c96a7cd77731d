"""Acceleration of a model from outside: kernels and CUDA graphs, on by default on a GPU, and torch.compile."""

from contextlib import AbstractContextManager

import torch
from torch import nn

from logdepth.blocks import Block
from logdepth.blocks.paper_layer import EmbeddingNet
from logdepth.models import LM, LanguageModel
from logdepth.operators.fused import FusedOperator
from logdepth.ops import kernels
from logdepth.scanning.merge import operator_pair


def kernels_as_asked(accelerate: bool) -> AbstractContextManager[None]:
    """A scope in which ops use their kernels on a GPU, or not at all."""
    return kernels(None if accelerate else False)


def acceleration_in_words(model: LanguageModel, accelerate: bool) -> str:
    """One line that says what accelerates the model on its device, and what in it does not run by kernels, and why."""
    parameter = next(model.parameters())
    if not accelerate:
        return "acceleration: off"
    if not parameter.is_cuda:
        return f"acceleration: none on the {parameter.device.type}; it is for CUDA"
    reasons = list(dict.fromkeys(_why_plain(model, torch.empty(0, device=parameter.device, dtype=parameter.dtype))))
    return "acceleration: kernels and CUDA graphs" + "".join(f"; {one}" for one in reasons)


def _why_plain(model: LanguageModel, like: torch.Tensor) -> list[str]:
    """For each scan that does not run by kernels, the reason."""
    found = []
    blocks = [block for block in model.modules() if isinstance(block, Block)]
    for block in blocks:
        for pair in block.scan_operators():
            up, down = operator_pair(pair)
            if isinstance(up, FusedOperator):
                if (reason := up.why_plain(down, like)) is not None:
                    found.append(reason)
            else:
                found.append(f"there are no kernels for {type(up).__name__}, whose scan runs in plain torch")
    return found


def compile_model(model: LanguageModel, *, any_length: bool = False) -> None:
    """Compiles in place, so that weights keep their names: operators and nets of scans, or the whole forward pass.

    Args:
        model: a language model.
        any_length: compile once for any length, instead of for each shape that comes.
    """
    torch.compiler.reset()  # earlier compilations in this process would count against the model's limit
    dynamic = True if any_length else None
    scans = [one for one in model.modules() if isinstance(one, Block) and one.scan_operators()]
    if not isinstance(model, LM):
        model.compile(dynamic=dynamic)
    elif not scans:
        setattr(model, "run", torch.compile(model.run, dynamic=dynamic))  # noqa: B010
    for block in scans:
        operators = [one for pair in block.scan_operators() for one in operator_pair(pair)]
        nets = [one for one in block.modules() if isinstance(one, EmbeddingNet)]
        for part in dict.fromkeys((*operators, *nets)):
            if isinstance(part, nn.Module) and any(True for _ in part.parameters()):
                part.compile(dynamic=True)
