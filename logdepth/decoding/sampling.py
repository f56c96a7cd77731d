"""How the next token is chosen from the scores of all: the settings, and the choice itself, in float64."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

FIRST_CANDIDATES = 64
"""Number of likeliest tokens that are sorted first; more are sorted only where the choice is not among them."""


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen.

    Its settings apply in the order repetition_penalty, temperature, top_k, top_p, min_p.
    """

    max_tokens: int = 200
    """Maximum number of tokens after each prompt."""
    temperature: float = 1.0
    """Softmax temperature: below 1, likely tokens become likelier; 0 always takes the likeliest."""
    top_k: int | None = None
    """Choose only among this many likeliest tokens; by default among all."""
    top_p: float | None = None
    """Choose only among the likeliest tokens that together have this probability; by default among all."""
    min_p: float | None = None
    """Choose only among tokens with at least this share of the likeliest token's probability; by default among all."""
    repetition_penalty: float = 1.0
    """Divide positive logits of tokens that are in the prompt or the text by this number, and multiply negative ones;
    above 1, tokens are repeated less."""
    seed: int = 0
    """Random seed for the choice of tokens."""
    stop: tuple[str, ...] = ()
    """Texts at which a row ends; the text itself is left out."""

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1; got {self.max_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 or above; got {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k must be at least 1; got {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be above 0 and at most 1; got {self.top_p}")
        if self.min_p is not None and not 0 < self.min_p <= 1:
            raise ValueError(f"min_p must be above 0 and at most 1; got {self.min_p}")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(f"repetition_penalty must be above 0 and finite; got {self.repetition_penalty}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be from 0 to below 2^63; got {self.seed}")
        if "" in self.stop:
            raise ValueError("a stop text must not be empty")


def choose(
    scores: np.ndarray, config: SamplingConfig, generator: np.random.Generator, before: Collection[int] = ()
) -> int:
    """A token, from the scores of all and the tokens before; in float64, so devices differ as little as they can.

    One number is drawn from the generator. The token is where the cumulative probabilities pass it, likeliest first.
    """
    if config.repetition_penalty != 1:
        scores = penalised(scores, before, config.repetition_penalty)
    if config.temperature == 0:
        return int(scores.argmax())
    drawn, highest = generator.random(), scores.max()
    mass = float(np.exp((scores - highest) / config.temperature).sum())
    count = max(FIRST_CANDIDATES, config.top_k or 0)
    while True:
        rest = max(len(scores) - count, 0)
        first = np.sort(np.partition(scores, rest)[rest:])[::-1]
        weights = np.exp((first - highest) / config.temperature)
        place = _place(weights, mass, rest == 0, config, drawn)
        if place is not None:
            # Of tokens with equal scores, those with lower numbers come first.
            return int(np.flatnonzero(scores == first[place])[place - int((first > first[place]).sum())])
        count *= 16  # the choice is further down


def choose_rows(logits: Tensor, configs: Sequence[SamplingConfig], drawn: Sequence[float]) -> list[int]:
    """The choices for many rows at once, where the logits are: on a GPU, only the tokens leave it.

    Args:
        logits: `[rows, vocab]`.
        configs: the settings of each row, without a repetition penalty.
        drawn: the number from 0 to below 1 that each row has drawn.
    """

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).to(logits.device)[:, None]

    scores, order = logits.double().sort(dim=-1, descending=True, stable=True)
    place = torch.arange(scores.shape[1], device=scores.device)
    weights = ((scores - scores[:, :1]) / column([config.temperature or 1.0 for config in configs])).exp()
    # At a temperature of 0, only the likeliest token may be chosen.
    counts = [1 if config.temperature == 0 else config.top_k or len(place) for config in configs]
    kept = place < column([float(count) for count in counts])
    cumulative = (weights * kept).cumsum(dim=-1)
    below = cumulative / cumulative[:, -1:] < column([config.top_p or 2.0 for config in configs])
    likely = weights >= column([config.min_p or 0.0 for config in configs])
    kept = kept & (place <= below.sum(dim=-1, keepdim=True)) & likely
    cumulative = (weights * kept).cumsum(dim=-1)
    found = (cumulative <= column(list(drawn)) * cumulative[:, -1:]).sum(dim=-1, keepdim=True)
    last = (kept.sum(dim=-1, keepdim=True) - 1).clamp(min=0)  # rounding may put `found` after it
    chosen: list[int] = order.gather(1, torch.minimum(found, last))[:, 0].tolist()
    return chosen


def penalised(scores: np.ndarray, before: Collection[int], penalty: float) -> np.ndarray:
    """The scores after the repetition penalty of CTRL (Keskar et al. 2019) on the tokens before, each once."""
    changed, tokens = scores.copy(), list(before if isinstance(before, set) else set(before))
    changed[tokens] = np.where(scores[tokens] > 0, scores[tokens] / penalty, scores[tokens] * penalty)
    return changed


def likeliest(scores: np.ndarray, count: int) -> np.ndarray:
    """At least `count` tokens with the highest scores, likeliest first, as they come first if all are sorted stably."""
    if count >= len(scores):
        return np.argsort(-scores, kind="stable")
    lowest = np.partition(scores, len(scores) - count)[len(scores) - count]
    candidates = np.flatnonzero(scores >= lowest)
    return candidates[np.argsort(-scores[candidates], kind="stable")]


def _place(first: np.ndarray, mass: float, whole: bool, config: SamplingConfig, drawn: float) -> int | None:
    """The place of the chosen token among the likeliest ones; None if it depends on more of them.

    Args:
        first: the weights of the likeliest tokens, highest first.
        mass: the weight of all tokens.
        whole: whether `first` are all tokens.
        config: which of them may be chosen.
        drawn: a number from 0 to below 1.
    """
    kept = len(first) if config.top_k is None else min(config.top_k, len(first))
    cumulative = first[:kept].cumsum()
    if whole or config.top_k is not None:
        mass = cumulative[-1]
    ends = whole or config.top_k is not None  # no token after these may be chosen
    if config.top_p is not None:
        below = int((cumulative / mass < config.top_p).sum())
        if below < kept:
            kept, ends = below + 1, True
            mass = cumulative[kept - 1]
        elif not ends:
            return None
    if config.min_p is not None:
        likely = int((first[:kept] >= config.min_p * first[0]).sum())
        if likely < kept:
            kept, ends = likely, True
            mass = cumulative[kept - 1]
        elif not ends:
            return None
    place = int(cumulative[:kept].searchsorted(drawn * mass, side="right"))
    if place < kept:
        return place
    return kept - 1 if ends else None
