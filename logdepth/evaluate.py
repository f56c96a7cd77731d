"""Perplexity of a model on a split: in windows of any length, or strided; in three units, and by position.

Windows follow each other without a gap, and the short last one counts too: every token of the split but its first is
predicted exactly once. Words and bytes are those of the raw text, so that their units do not depend on the tokenizer.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from logdepth.acceleration import kernels_as_asked
from logdepth.capture import Captured
from logdepth.data import StoreInfo, TokenStore, document_bounds
from logdepth.models import LanguageModel
from logdepth.ops.precision import Precision, arithmetic
from logdepth.parallel import ALONE, Ranks

PAPER_CONTEXTS = tuple(range(32, 2977, 128))
"""The paper's grid: 32, 160, …, 2,976."""
BATCH_TOKENS = 16_384
"""Tokens that go through a model at once; longer windows go through in parts, with the state carried on."""


TokenLosses = Callable[[Tensor, Tensor], Tensor]
"""Inputs and targets, `[rows, length]` each, to the loss at each position."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What a model loses on a split, in nats, and the units in which people ask."""

    corpus: str
    split: str
    context: int
    stride: int
    tokens: int
    """Tokens predicted: all but the split's first."""
    words: int
    """Words and line ends of the raw text."""
    bytes: int
    """Of the raw text."""
    separator: int | None
    """The token after every document, whose prediction is part of the loss; None where the split is one stream."""
    unknown: int
    """Tokens of the split whose text the tokenizer does not know. It is lost, which flatters words and bytes."""
    nats: float
    position_nats: NDArray[np.float64]
    """Total loss at each position of a window."""
    position_tokens: NDArray[np.int64]
    """Tokens predicted at each position of a window."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def token_perplexity(self) -> float:
        return perplexity(self.loss)

    @property
    def word_perplexity(self) -> float:
        """The exponential of the total loss over words and line ends."""
        return perplexity(self.nats / self.words)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes

    @property
    def position_loss(self) -> NDArray[np.float64]:
        """Nats per token at each position of a window; NaN where nothing was predicted."""
        counted = self.position_tokens > 0
        return np.where(counted, self.position_nats / np.maximum(self.position_tokens, 1), np.nan)

    def as_dict(self, positions: bool = False) -> dict[str, Any]:
        """The numbers, for JSON; with the loss by position if asked."""
        found: dict[str, Any] = {
            "corpus": self.corpus,
            "split": self.split,
            "context": self.context,
            "stride": self.stride,
            "tokens": self.tokens,
            "words": self.words,
            "bytes": self.bytes,
            "separator": self.separator,
            "unknown": self.unknown,
            "nats": self.nats,
            "loss": self.loss,
            "token_perplexity": self.token_perplexity,
            "word_perplexity": self.word_perplexity,
            "bits_per_byte": self.bits_per_byte,
        }
        if positions:
            found["position_loss"] = [round(loss, 6) if math.isfinite(loss) else None for loss in self.position_loss]
        return found


def loss_graphs(model: LanguageModel, on_warning: Callable[[str], None]) -> Captured:
    """CUDA graphs for evaluations of a model whose weights change between them; every replay reads the weights.

    on_warning: called with the line that says why there is no graph.
    """

    def losses(inputs: Tensor, targets: Tensor) -> Tensor:
        with model.frozen_weights():  # for this pass: what depends on weights alone is a part of the graph
            return _token_losses(model, inputs, targets)

    return Captured(losses, on_warning=on_warning)


class _Windows(NamedTuple):
    """Rows of one length that go through the model together, and the first position that counts in them."""

    starts: list[int]
    length: int
    counted_from: int


@torch.inference_mode()
def evaluate(
    model: LanguageModel,
    store: TokenStore,
    *,
    context: int,
    stride: int | None = None,
    precision: Precision = "auto",
    reset_at_documents: bool = False,
    accelerate: bool = True,
    graphs: Captured | None = None,
    ranks: Ranks = ALONE,
    on_progress: Callable[[int], None] = lambda _: None,
) -> Evaluation:
    """The loss over a split, in windows of `context` tokens.

    Args:
        stride: how far a window starts after the one before; only its tokens that were not yet predicted count, so
            that each has at least `context - stride` tokens before it. By default `context`: windows side by side.
        reset_at_documents: each document in a window starts anew, for models that were trained so.
        accelerate: on a GPU, use kernels, and replay windows of one shape as a CUDA graph.
        graphs: the model's `loss_graphs`, to be replayed by one evaluation after the other.
        ranks: the processes that share the windows; all of them must call this, and all get the result.
        on_progress: called with the tokens predicted so far; what it raises ends the evaluation. Every rank calls it
            equally often.
    """
    stride = context if stride is None else stride
    if context < 1 or not 1 <= stride <= context:
        raise ValueError(f"context must be at least 1 and stride from 1 to context; got {context} and {stride}")
    info, device = store.info, next(model.parameters()).device
    store.refuse_if_nothing_to_predict()
    separator = info.separator if reset_at_documents else None
    longest = min(context, len(store) - 1)
    nats, counts = np.zeros(longest), np.zeros(longest, dtype=np.int64)
    was_training = model.training
    model.eval()
    plain = partial(_token_losses, model)
    losses_of: TokenLosses = graphs or (Captured(plain) if accelerate else plain)
    try:
        done = 0
        with kernels_as_asked(accelerate), nullcontext() if graphs else model.frozen_weights():
            batches = _windows(len(store) - 1, context, stride, BATCH_TOKENS)
            while batch := list(islice(batches, ranks.world_size)):  # one for each rank, but in the last round
                for windows in batch[ranks.rank : ranks.rank + 1]:
                    rows = np.stack([store.window(start, windows.length + 1) for start in windows.starts])
                    with arithmetic(precision, device):
                        losses = _losses(model, losses_of, torch.from_numpy(rows).to(device), separator, BATCH_TOKENS)
                    nats[windows.counted_from : windows.length] += losses[:, windows.counted_from :].sum(axis=0)
                    counts[windows.counted_from : windows.length] += len(rows)
                done += sum(len(one.starts) * (one.length - one.counted_from) for one in batch)
                on_progress(done)
    finally:
        model.train(was_training)
    nats, counts = ranks.sum(nats), ranks.sum(counts)
    return _evaluation(info, context, stride, nats, counts)


def _windows(num_predictions: int, context: int, stride: int, batch_tokens: int) -> Iterator[_Windows]:
    """All windows over the inputs, in batches of one shape. Each prediction is counted once."""
    num_rows = max(1, batch_tokens // context)
    full: list[int] = []
    start, counted_to = 0, 0
    while counted_to < num_predictions:
        end = min(start + context, num_predictions)
        counted_from = counted_to - start
        if (end - start, counted_from) != (context, context - stride):  # the first, or a short last one
            if full:
                yield _Windows(full, context, context - stride)
                full = []
            yield _Windows([start], end - start, counted_from)
        else:
            full.append(start)
            if len(full) == num_rows:
                yield _Windows(full, context, context - stride)
                full = []
        counted_to = end
        start += stride
    if full:
        yield _Windows(full, context, context - stride)


def _losses(
    model: LanguageModel, losses_of: TokenLosses, rows: Tensor, separator: int | None, batch_tokens: int
) -> NDArray[np.float64]:
    """Nats at every position of `[rows, length + 1]` tokens."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    if separator is None:
        return _row_losses(model, losses_of, inputs, targets, batch_tokens)
    bounds = document_bounds(inputs.cpu().numpy(), separator)
    losses = _document_losses(model, losses_of, inputs.flatten(), targets.flatten(), bounds, batch_tokens)
    return losses.reshape(inputs.shape)


def _row_losses(
    model: LanguageModel, losses_of: TokenLosses, inputs: Tensor, targets: Tensor, batch_tokens: int
) -> NDArray[np.float64]:
    if inputs.numel() <= batch_tokens:
        return _on_host(losses_of(inputs, targets))
    parts, state = [], model.init_state(len(inputs))
    part = max(1, batch_tokens // len(inputs))
    for start in range(0, inputs.shape[1], part):
        losses, state = model.token_losses(inputs[:, start : start + part], targets[:, start : start + part], state)
        parts.append(_on_host(losses))
    return np.concatenate(parts, axis=1)


def _document_losses(
    model: LanguageModel,
    losses_of: TokenLosses,
    inputs: Tensor,
    targets: Tensor,
    bounds: Sequence[int],
    batch_tokens: int,
) -> NDArray[np.float64]:
    """Each packed document as if alone: as many at once as the bound allows, also where a model pads them."""
    losses, first = [], 0
    while first < len(bounds) - 1:
        last, longest = first + 1, bounds[first + 1] - bounds[first]
        while last < len(bounds) - 1:
            longest = max(longest, bounds[last + 1] - bounds[last])
            if bounds[last + 1] - bounds[first] > batch_tokens or (last + 1 - first) * longest > 4 * batch_tokens:
                break
            last += 1
        part = slice(bounds[first], bounds[last])
        if last == first + 1:
            losses.append(_row_losses(model, losses_of, inputs[None, part], targets[None, part], batch_tokens)[0])
        else:
            cu_seqlens = [bound - bounds[first] for bound in bounds[first : last + 1]]
            losses.append(_on_host(model.token_losses(inputs[part], targets[part], cu_seqlens=cu_seqlens)[0]))
        first = last
    return np.concatenate(losses)


def _token_losses(model: LanguageModel, inputs: Tensor, targets: Tensor) -> Tensor:
    return model.token_losses(inputs, targets)[0]


def _on_host(losses: Tensor) -> NDArray[np.float64]:
    return losses.double().cpu().numpy()


def _evaluation(
    info: StoreInfo, context: int, stride: int, nats: NDArray[np.float64], counts: NDArray[np.int64]
) -> Evaluation:
    return Evaluation(
        corpus=info.corpus,
        split=info.split,
        context=context,
        stride=stride,
        tokens=int(counts.sum()),
        words=info.words + info.line_ends,
        bytes=info.bytes,
        separator=info.separator,
        unknown=info.unknown,
        nats=float(nats.sum()),
        position_nats=nats,
        position_tokens=counts,
    )


def perplexity(nats: float) -> float:
    """The exponential of a mean loss, where it can be written as a number."""
    return math.exp(nats) if nats < 700 else math.inf
