"""Time of a model's forward pass, or forward and backward, against context length, and what computed its attention."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from logdepth.acceleration import kernels_as_asked
from logdepth.capture import Captured
from logdepth.models import LanguageModel
from logdepth.ops.precision import Precision, arithmetic

What = Literal["forward", "train"]
CAPTURED_AFTER = 3
"""Batches before a CUDA graph is replayed: two that run as they are, and the capture."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """One context length."""

    context: int
    batch_size: int
    milliseconds: float
    """Median of a batch."""
    fastest: float
    lower_quartile: float
    upper_quartile: float
    repeats: int
    tokens_per_second: float
    attention: str | None
    """What computed attention; None for models without it."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def time_model(
    model: LanguageModel,
    contexts: Sequence[int],
    *,
    batch_size: int | None = None,
    batch_tokens: int = 16_384,
    what: What = "forward",
    precision: Precision = "auto",
    accelerate: bool = True,
    repeats: int = 10,
    warmups: int = 3,
) -> Iterator[Timing]:
    """Times a batch at each context length: `batch_size` rows, or as many as make `batch_tokens`.

    Tokens are random. The numbers are medians of single batches after warm-up, each awaited on the device. With
    `accelerate`, on a GPU, kernels are used and a batch is one CUDA graph.
    """
    device = next(model.parameters()).device
    model.train(what == "train")
    generator = torch.Generator().manual_seed(0)
    with model.frozen_weights():
        for context in contexts:
            rows = batch_size or max(1, batch_tokens // context)
            tokens = torch.randint(model.vocab_size, (rows, context + 1), generator=generator).to(device)
            work = _work(model, tokens, what, precision, accelerate)
            for _ in range(max(warmups, CAPTURED_AFTER) if accelerate else warmups):
                work()
            seconds = [_timed(work, device) for _ in range(repeats)]
            quartiles = statistics.quantiles(seconds, n=4, method="inclusive") if repeats > 1 else [seconds[0]] * 3
            median = statistics.median(seconds)
            yield Timing(
                context=context,
                batch_size=rows,
                milliseconds=1e3 * median,
                fastest=1e3 * min(seconds),
                lower_quartile=1e3 * quartiles[0],
                upper_quartile=1e3 * quartiles[2],
                repeats=repeats,
                tokens_per_second=rows * context / median,
                attention=attention_of(model, precision),
            )


def attention_of(model: LanguageModel, precision: Precision) -> str | None:
    """What computes a model's attention in this precision, in words; None for models without it."""
    with arithmetic(precision, next(model.parameters()).device):
        return model.attention_in_words()


def _work(
    model: LanguageModel, tokens: Tensor, what: What, precision: Precision, accelerate: bool
) -> Callable[[], object]:
    device = tokens.device

    @torch.inference_mode()
    def forward(tokens: Tensor) -> Tensor:
        with arithmetic(precision, device), kernels_as_asked(accelerate):
            logits: Tensor = model(tokens[:, :-1])
        return logits

    def forward_and_backward(tokens: Tensor) -> Tensor:
        with arithmetic(precision, device), kernels_as_asked(accelerate):
            loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        torch.autograd.backward(loss)
        model.zero_grad(set_to_none=True)
        return loss.detach()

    function = forward if what == "forward" else forward_and_backward
    return partial(Captured(function) if accelerate else function, tokens)


def _timed(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start
