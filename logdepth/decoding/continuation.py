"""A text that is being generated: its tokens, chosen one by one, and the text that is certain after each of them.

It depends on the prompt, the settings and its number only, not on what else is generated beside it.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from torch import Tensor

from logdepth.data import Tokenizer
from logdepth.decoding.sampling import SamplingConfig, choose, choose_rows
from logdepth.errors import UserError

Ending = Literal["stop", "length"]
"""Why a text has ended: the end of the document or a stop text; or as many tokens as it may have."""


class NotFiniteError(UserError):
    """A model's logits are not finite, so that no token can be chosen."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__("the model's logits are not finite: its training has diverged; use other weights")
        self.rows = rows
        """The texts whose logits are not finite."""


class Detokenizer:
    """The text that tokens add one by one. A character that still misses bytes is held back."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        """
        Args:
            tokenizer: the model's.
            before: tokens before the first one, whose text is known already.
        """
        self.tokenizer = tokenizer
        self._tokens = _end_of(tokenizer, before)
        """The newest tokens, from which text is decoded again: what a token adds depends on what is before it."""
        self._certain = len(self._tokens)
        """How many of them are text already."""

    def add(self, token: int) -> str:
        self._tokens.append(token)
        return self._added(last=False)

    def finish(self) -> str:
        """What was held back, because nothing follows."""
        return self._added(last=True)

    def _added(self, *, last: bool) -> str:
        before, now = self.tokenizer.decode(self._tokens[: self._certain]), self.tokenizer.decode(self._tokens)
        if now.endswith("\ufffd") and not last:
            return ""
        while not now.startswith(before):  # the tokens before ended within a character, which is complete now
            before = before[:-1]
        added = now[len(before) :]
        # Decoding drops a space at the very start, so what is decoded again must not begin with spaces alone.
        if added.strip():
            del self._tokens[: self._certain]
        self._certain = len(self._tokens)
        return added


def _end_of(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """As many of the last tokens as are needed to decode what follows: few, however many there are.

    They must not begin within a character, and not be spaces alone.
    """
    start = len(tokens)
    while start > 0:
        start = max(0, start - max(8, len(tokens) - start))
        text = tokenizer.decode(tokens[start:])
        if text.strip() and not text.startswith("\ufffd"):
            break
    return list(tokens[start:])


class Continuation:
    """The continuation of a prompt. `choose` a token from its scores, then `add` it."""

    tokens: list[int]
    """The prompt's tokens, then the chosen ones; without the end of the document."""
    ended: Ending | None
    """Why the text has ended; None while it has not."""
    added: str
    """The text of the newest token, which may not be certain yet; empty while a character misses bytes."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        config: SamplingConfig,
        number: int = 0,
        *,
        separated: bool = True,
    ) -> None:
        """
        Args:
            tokenizer: the model's.
            prompt: tokens before the text, at least one.
            config: how tokens are chosen, how many, and what ends the text.
            number: of this text among those with the same seed, which are all different.
            separated: whether the model knows the end of a document, which then ends the text.
        """
        self.tokenizer, self.config, self.number, self.separated = tokenizer, config, number, separated
        self.generator = np.random.default_rng([config.seed, number])
        self.tokens, self.num_prompt = list(prompt), len(prompt)
        self._distinct = set(prompt) if config.repetition_penalty != 1 else set()
        """The tokens on which the repetition penalty is."""
        self.ended, self.added = None, ""
        self._detokenizer = Detokenizer(tokenizer, prompt)
        self._held = ""
        """Text that is not given out yet, because it may be the beginning of a stop text."""

    @property
    def num_chosen(self) -> int:
        """Tokens of the text so far."""
        return len(self.tokens) - self.num_prompt

    def choose(self, scores: np.ndarray) -> int:
        """The next token, from the scores of all tokens in float64."""
        return choose(scores, self.config, self.generator, self._distinct)

    def add(self, token: int) -> str:
        """Add the chosen token; return the text that is certain now and was not before."""
        self.added = ""
        if self.separated and token == self.tokenizer.end_of_document:
            self.ended = "stop"
        else:
            self.tokens.append(token)
            self._distinct.add(token)
            self.added = self._detokenizer.add(token)
            if self.num_chosen == self.config.max_tokens:
                self.ended = "length"
        if self.ended:
            self.added += self._detokenizer.finish()
        self._held += self.added
        found = [place for stop in self.config.stop if (place := self._held.find(stop)) >= 0]
        if found:
            self.ended = "stop"
            certain = min(found)
        else:
            certain = len(self._held) - (0 if self.ended else beginning_of_a_stop(self._held, self.config.stop))
        text, self._held = self._held[:certain], self._held[certain:]
        return text


def choose_next(texts: Sequence[Continuation], logits: Tensor, *, together: bool | None = None) -> list[int]:
    """The next token of each text, from the logits of all, `[texts, vocab]`.

    Args:
        texts: of any settings.
        logits: those of each text.
        together: whether all are chosen at once where the logits are; by default on a GPU.

    Raises:
        NotFiniteError: before anything is drawn, if the highest logit of a text is not finite.
    """
    finite = logits.amax(dim=-1).isfinite()
    if not finite.all():
        raise NotFiniteError((~finite).nonzero()[:, 0].tolist())
    together = logits.is_cuda if together is None else together
    if together and all(text.config.repetition_penalty == 1 for text in texts):
        # As in `choose`, nothing is drawn where the likeliest token is taken.
        drawn = [0.0 if text.config.temperature == 0 else text.generator.random() for text in texts]
        return choose_rows(logits, [text.config for text in texts], drawn)
    return [text.choose(scores) for text, scores in zip(texts, logits.double().cpu().numpy(), strict=True)]


def beginning_of_a_stop(text: str, stops: tuple[str, ...]) -> int:
    """How many characters at the end of the text may be the beginning of a stop text."""
    longest = 0
    for stop in stops:
        for length in range(1, len(stop)):
            if text.endswith(stop[:length]):
                longest = max(longest, length)
    return longest
