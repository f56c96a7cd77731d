"""Text from a model, token by token: prompts of different lengths as one batch, each row's text as it comes.

A row's text depends on its prompt, its number and the seed only, not on the other rows.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from logdepth.acceleration import kernels_as_asked
from logdepth.data import Tokenizer
from logdepth.decoding import Decoder
from logdepth.errors import UserError
from logdepth.models import LM, LanguageModel, ModelState
from logdepth.ops.precision import Precision, arithmetic


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


class Piece(NamedTuple):
    """A piece of the text of one row; the last piece of a row is marked."""

    row: int
    text: str
    last: bool


@dataclass
class _Row:
    """A text that is being generated."""

    number: int
    generator: np.random.Generator
    tokens: list[int]
    """The prompt's tokens, then the chosen ones."""
    left: int
    """How many more tokens may be chosen."""
    decoded: tuple[int, int]
    """Tokens before the second index are text already; decoding restarts at the first index, because of spaces."""
    held: str = ""
    """Text that is not given out yet, because it may be the beginning of a stop text."""


@torch.inference_mode()
def generate(
    model: LanguageModel,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    config: SamplingConfig,
    *,
    separated: bool = True,
    precision: Precision = "auto",
    accelerate: bool = True,
    on_warning: Callable[[str], None] = warnings.warn,
) -> Iterator[Piece]:
    """The texts that follow the prompts, in pieces as they come.

    Args:
        separated: whether the model knows the end of a document, which then ends a text and starts one without a
            prompt.
        accelerate: on a GPU, use kernels, and record steps as CUDA graphs.
        on_warning: called with one line, once, if steps cannot be recorded.
    """
    model.eval()
    device = next(model.parameters()).device
    rows = []
    for number, prompt in enumerate(prompts):
        tokens = _prompt_tokens(tokenizer, prompt, separated)
        generator = np.random.default_rng([config.seed, number])
        rows.append(_Row(number, generator, tokens, config.max_tokens, (0, len(tokens))))
    if not rows:
        return
    with arithmetic(precision, device), kernels_as_asked(accelerate):
        lengths = [len(row.tokens) for row in rows]
        padded = torch.zeros(len(rows), max(lengths), dtype=torch.int64)
        for number, row in enumerate(rows):
            padded[number, : lengths[number]] = torch.tensor(row.tokens)
        logits, state = model.step(padded.to(device), model.init_state(len(rows)), lengths=lengths)
        last = logits[torch.arange(len(rows)), torch.tensor(lengths) - 1]
    steps: Decoder | _ModelSteps
    if isinstance(model, LM):
        steps = Decoder(model, state, graphs=accelerate, on_warning=on_warning)
    else:
        steps = _ModelSteps(model, state)
    while True:
        scored = zip(_rows(last), rows, strict=True)
        chosen = [_choose(scores, config, row.generator, row.tokens) for scores, row in scored]
        going = []
        for place, (row, token) in enumerate(zip(rows, chosen, strict=True)):
            piece = _piece_after(row, token, tokenizer, config, separated)
            if piece.text or piece.last:
                yield piece
            if not piece.last:
                going.append(place)
        if not going:
            return
        if len(going) < len(rows):
            rows = [rows[place] for place in going]
            steps.select(going)
        newest = torch.tensor([row.tokens[-1] for row in rows], device=device)
        with arithmetic(precision, device), kernels_as_asked(accelerate):
            last = steps.step(newest)


class _ModelSteps:
    """Tokens one by one through `model.step`, for models that are no LM."""

    def __init__(self, model: LanguageModel, state: ModelState) -> None:
        self.model, self.at = model, state

    def step(self, tokens: Tensor) -> Tensor:
        logits, self.at = self.model.step(tokens[:, None], self.at)
        return logits[:, -1]

    def select(self, rows: Sequence[int]) -> None:
        self.at = self.at.select(rows)


def _prompt_tokens(tokenizer: Tokenizer, prompt: str, separated: bool) -> list[int]:
    try:
        prompt.encode()
    except UnicodeEncodeError:
        raise UserError(f"the prompt {prompt!r} is not text in UTF-8") from None
    tokens = tokenizer.encode(prompt)
    if tokens:
        return tokens
    if not separated:
        raise UserError("this model was trained on one stream of text and cannot start from nothing; give a --prompt")
    return [tokenizer.end_of_document]


def _rows(logits: Tensor) -> list[np.ndarray]:
    return list(logits.double().cpu().numpy())


def _choose(
    scores: np.ndarray, config: SamplingConfig, generator: np.random.Generator, before: Sequence[int] = ()
) -> int:
    """A token, from the scores of all and the tokens before; in float64, so devices differ as little as they can."""
    if config.repetition_penalty != 1:
        scores = _penalised(scores, list(set(before)), config.repetition_penalty)
    if config.temperature == 0:
        return int(scores.argmax())
    order, probabilities = _likeliest(scores, config)
    return int(order[generator.choice(len(probabilities), p=probabilities)])


def _penalised(scores: np.ndarray, tokens: list[int], penalty: float) -> np.ndarray:
    """The scores after the repetition penalty of CTRL (Keskar et al. 2019) on these tokens."""
    penalised = scores.copy()
    penalised[tokens] = np.where(scores[tokens] > 0, scores[tokens] / penalty, scores[tokens] * penalty)
    return penalised


def _likeliest(scores: np.ndarray, config: SamplingConfig) -> tuple[np.ndarray, np.ndarray]:
    """All tokens, likeliest first, and the probabilities of the first of them, which may be chosen."""
    order = np.argsort(-scores, kind="stable")
    scaled = (scores[order] - scores[order[0]]) / config.temperature
    probabilities = np.exp(scaled)
    probabilities /= probabilities.sum()
    kept = len(order) if config.top_k is None else min(config.top_k, len(order))
    if config.top_p is not None:
        below = np.cumsum(probabilities[:kept] / probabilities[:kept].sum()) < config.top_p
        kept = min(kept, int(below.sum()) + 1)
    if config.min_p is not None:
        kept = min(kept, int((probabilities >= config.min_p * probabilities[0]).sum()))
    return order, probabilities[:kept] / probabilities[:kept].sum()


def _piece_after(row: _Row, token: int, tokenizer: Tokenizer, config: SamplingConfig, separated: bool) -> Piece:
    """Adds a token to a row and gives out the text that is certain now."""
    ended = separated and token == tokenizer.end_of_document
    if not ended:
        row.tokens.append(token)
        row.left -= 1
    ended = ended or not row.left
    row.held += _decoded(row, tokenizer, ended)
    found = [place for stop in config.stop if (place := row.held.find(stop)) >= 0]
    if found:
        return Piece(row.number, row.held[: min(found)], True)
    certain = len(row.held) - (0 if ended else _beginning_of_a_stop(row.held, config.stop))
    text, row.held = row.held[:certain], row.held[certain:]
    return Piece(row.number, text, ended)


def _decoded(row: _Row, tokenizer: Tokenizer, ended: bool) -> str:
    """The text that the newest tokens add; nothing while a character still misses bytes."""
    start, end = row.decoded
    before, now = tokenizer.decode(row.tokens[start:end]), tokenizer.decode(row.tokens[start:])
    if now.endswith("\ufffd") and not ended:
        return ""
    added = now[len(before) :]
    # Decoding drops a space at the very start, so what is decoded again must not begin with spaces alone.
    row.decoded = (end if added.strip() else start, len(row.tokens))
    return added


def _beginning_of_a_stop(text: str, stops: tuple[str, ...]) -> int:
    """How many characters at the end of the text may be the beginning of a stop text."""
    longest = 0
    for stop in stops:
        for length in range(1, len(stop)):
            if text.endswith(stop[:length]):
                longest = max(longest, length)
    return longest
