"""A text that is being generated: its tokens, chosen one by one, and the text that is certain after each of them.

It depends on the prompt, the settings and its number only, not on what else is generated beside it.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from logdepth.data import Tokenizer
from logdepth.decoding.sampling import SamplingConfig, choose

Ending = Literal["stop", "length"]
"""Why a text has ended: the end of the document or a stop text; or as many tokens as it may have."""


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
        self.ended, self.added = None, ""
        # Tokens before the second index are text already. Decoding restarts at the first index, because of spaces.
        self._decoded = _restart(tokenizer, self.tokens), len(prompt)
        self._held = ""
        """Text that is not given out yet, because it may be the beginning of a stop text."""

    @property
    def num_chosen(self) -> int:
        """Tokens of the text so far."""
        return len(self.tokens) - self.num_prompt

    def choose(self, scores: np.ndarray) -> int:
        """The next token, from the scores of all tokens in float64."""
        return choose(scores, self.config, self.generator, self.tokens)

    def add(self, token: int) -> str:
        """Add the chosen token; return the text that is certain now and was not before."""
        if self.separated and token == self.tokenizer.end_of_document:
            self.ended = "stop"
        else:
            self.tokens.append(token)
            if self.num_chosen == self.config.max_tokens:
                self.ended = "length"
        self.added = self._newly_decoded()
        self._held += self.added
        found = [place for stop in self.config.stop if (place := self._held.find(stop)) >= 0]
        if found:
            self.ended = "stop"
            certain = min(found)
        else:
            certain = len(self._held) - (0 if self.ended else beginning_of_a_stop(self._held, self.config.stop))
        text, self._held = self._held[:certain], self._held[certain:]
        return text

    def _newly_decoded(self) -> str:
        """The text that the newest tokens add; nothing while a character still misses bytes."""
        start, end = self._decoded
        before, now = self.tokenizer.decode(self.tokens[start:end]), self.tokenizer.decode(self.tokens[start:])
        if now.endswith("\ufffd") and not self.ended:
            return ""
        while not now.startswith(before):  # the prompt ended within a character, which is complete now
            before = before[:-1]
        added = now[len(before) :]
        # Decoding drops a space at the very start, so what is decoded again must not begin with spaces alone.
        self._decoded = (end if added.strip() else start, len(self.tokens))
        return added


def _restart(tokenizer: Tokenizer, prompt: list[int]) -> int:
    """A token near the end of the prompt from which it can be decoded again: a long prompt takes no longer than others.

    What follows must not begin within a character, nor with spaces alone.
    """
    start = len(prompt)
    while start > 0:
        start = max(0, start - max(8, len(prompt) - start))
        text = tokenizer.decode(prompt[start:])
        if text.strip() and not text.startswith("\ufffd"):
            break
    return start


def beginning_of_a_stop(text: str, stops: tuple[str, ...]) -> int:
    """How many characters at the end of the text may be the beginning of a stop text."""
    longest = 0
    for stop in stops:
        for length in range(1, len(stop)):
            if text.endswith(stop[:length]):
                longest = max(longest, length)
    return longest
