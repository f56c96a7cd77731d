"""Jobs: what an engine is asked to do, and what it says while it does it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from logdepth.decoding import SamplingConfig
from logdepth.decoding.continuation import Ending
from logdepth.serve.snapshots import Snapshot


@dataclass(frozen=True, eq=False, kw_only=True)
class Job:
    """A prompt to read, and the texts that may follow it."""

    tokens: Sequence[int] | NDArray[np.int32]
    """All tokens of the prompt, at least one; those that `start` has read come first."""
    start: Snapshot | None = None
    """The state after the first of these tokens, with what the head reads there; None: there is none."""
    sampling: SamplingConfig | None = None
    """How the texts are chosen, how long they are and what ends them; None: the prompt is read and no text follows."""
    count: int = 1
    """The number of texts, which differ by their random numbers."""
    alternatives: int | None = None
    """For each chosen token, give its log-probability and those of so many likeliest tokens; None: give neither."""
    prompt_alternatives: int | None = None
    """The same for each token of the prompt that `start` has not read. The prompt is then read without the cache, but
    for its first `known` tokens."""
    known: int = 0
    """First tokens of the prompt whose probabilities are not needed."""
    slopes: bool = False
    """Whether to give the slopes of the level weights of keyed memories, at each token that is scored."""
    keep: bool = False
    """Whether the state after the prompt is given back."""

    @property
    def longest(self) -> int:
        """The length up to which a sequence may grow."""
        return len(self.tokens) + (0 if self.sampling is None else self.sampling.max_tokens)


class Scored(NamedTuple):
    """A token, its text, and how likely it was."""

    token: int
    text: str
    """What it adds to the text before; empty while a character misses bytes."""
    log_probability: float | None
    """In nats; None where there was nothing before the token, or nobody asked."""
    alternatives: tuple[tuple[int, float], ...] = ()
    """The likeliest tokens and their log-probabilities."""


class PromptRead(NamedTuple):
    """A stretch of the prompt has been read."""

    job: Job
    scored: tuple[Scored, ...]
    """Its tokens, if the job asked for their probabilities."""
    num_read: int
    """Tokens of the prompt that have been read so far."""
    num_cached: int
    """How many of them were taken from an earlier state."""
    state_bytes: int
    """Bytes of the state after them."""
    snapshot: Snapshot | None
    """The state after the whole prompt, if the job asked for it."""
    slopes: tuple[Tensor, ...] = ()
    """For each memory that is read by levels, `[tokens, heads, 2]`, if the job asked for them."""


class TextAdded(NamedTuple):
    """A text has grown."""

    job: Job
    number: int
    """Of the text, from 0."""
    text: str
    """What is certain now and was not before; it may be empty."""
    scored: tuple[Scored, ...]
    """The tokens whose text begins in it, if the job asked for their probabilities."""
    num_tokens: int
    """Tokens of the text so far."""
    ended: Ending | None


class Failed(NamedTuple):
    """The job has ended without a result."""

    job: Job
    reason: str


Event = PromptRead | TextAdded | Failed
