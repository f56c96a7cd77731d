"""Replies in the shapes of OpenAI's API: whole, or in chunks as texts grow."""

import itertools
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from logdepth.data import Tokenizer
from logdepth.decoding.continuation import Ending
from logdepth.serve.jobs import Job, PromptRead, Scored, TextAdded
from logdepth.version import __version__

FINGERPRINT = f"logdepth-{__version__}"


class TokenNames:
    """Tokens as clients see them: text where it is text, and bytes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._processor = tokenizer.processor

    def name(self, token: int) -> str:
        """The token's own text, or bytes:\\xe2 for a part of a character."""
        if self._processor.is_byte(token):
            encoded = self.encoded(token)
            return encoded.decode() if encoded.isascii() else f"bytes:\\x{encoded.hex()}"
        piece: str = self._processor.id_to_piece(token)
        return piece.replace("\u2581", " ")

    def encoded(self, token: int) -> bytes:
        piece: str = self._processor.id_to_piece(token)
        if self._processor.is_byte(token):
            return bytes([int(piece[1:-1], 16)])  # <0xE2>
        return piece.replace("\u2581", " ").encode()


@dataclass
class Choice:
    """One text of a reply, as far as it has come."""

    index: int
    text: str = ""
    scored: list[Scored] = field(default_factory=list)
    num_tokens: int = 0
    ended: Ending | None = None
    num_characters: int = 0
    """Of the text of all scored tokens."""


class Reply(ABC):
    """The reply to one request: some prompts, and some texts for each."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, jobs: Sequence[Job], names: TokenNames, *, usage_in_stream: bool) -> None:
        self.model, self.jobs, self.names, self.usage_in_stream = model, jobs, names, usage_in_stream
        self.id = self.id_prefix + secrets.token_hex(12)
        self.created = int(time.time())
        self._first = {}
        count = 0
        for job in jobs:
            self._first[job] = count
            count += job.count
        self.choices = [Choice(index) for index in range(count)]
        self._num_cached = dict.fromkeys(jobs, 0)

    @abstractmethod
    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        """A text that is complete."""

    @abstractmethod
    def chunk_choice(self, choice: Choice, text: str, scored: Sequence[Scored], start: int = 0) -> dict[str, Any]:
        """What a text has grown by; the text of its scored tokens begins at `start`."""

    def trimmed(self, choice: Choice, text: str) -> str:
        """The text that is added, without what does not belong to the reply."""
        del choice
        return text

    def opening(self) -> Iterator[dict[str, Any]]:
        """Chunks before any text."""
        return iter(())

    def take(self, event: PromptRead | TextAdded) -> Iterator[dict[str, Any]]:
        """Take an event; the chunks that tell a client of it."""
        if isinstance(event, PromptRead):
            self._num_cached[event.job] = event.num_cached
            if event.scored:
                yield from self._echoed(event)
            return
        choice = self.choices[self._first[event.job] + event.number]
        choice.num_tokens, choice.ended = event.num_tokens, event.ended
        text = self.trimmed(choice, event.text)
        if text or event.scored or event.ended:
            yield self._grown(choice, text, event.scored)

    def closing(self) -> Iterator[dict[str, Any]]:
        """Chunks after all texts."""
        if self.usage_in_stream:
            yield self._envelope(self.chunk_object, []) | {"usage": self.usage()}

    def whole(self) -> dict[str, Any]:
        choices = [self.whole_choice(choice) for choice in self.choices]
        return self._envelope(self.whole_object, choices) | {"usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        prompt = sum(len(job.tokens) for job in self.jobs)
        text = sum(choice.num_tokens for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": text,
            "total_tokens": prompt + text,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached.values())},
        }

    def _echoed(self, event: PromptRead) -> Iterator[dict[str, Any]]:
        """The prompt's tokens, which are the beginning of each of its texts."""
        for number in range(event.job.count):
            choice = self.choices[self._first[event.job] + number]
            if event.job.sampling is None and event.num_read == len(event.job.tokens):
                choice.ended = "length"
            yield self._grown(choice, "".join(one.text for one in event.scored), event.scored)

    def _grown(self, choice: Choice, text: str, scored: Sequence[Scored]) -> dict[str, Any]:
        """The chunk for what a text grows by."""
        start = choice.num_characters
        choice.text += text
        choice.scored += scored
        choice.num_characters += sum(len(one.text) for one in scored)
        return self._envelope(self.chunk_object, [self.chunk_choice(choice, text, scored, start)])

    def _envelope(self, kind: str, choices: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }


class CompletionReply(Reply):
    """`/v1/completions`."""

    id_prefix, whole_object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(
        self,
        model: str,
        jobs: Sequence[Job],
        names: TokenNames,
        *,
        usage_in_stream: bool = False,
        echoed: Mapping[Job, str] | None = None,
        alternatives: int | None = None,
    ) -> None:
        """
        Args:
            model: its name.
            jobs: in the order of the prompts.
            names: of tokens.
            usage_in_stream: whether a last chunk says how many tokens there were.
            echoed: the prompts, where they are to be repeated before the texts and are not scored.
            alternatives: how many likely tokens are given beside each; None: no probabilities at all.
        """
        super().__init__(model, jobs, names, usage_in_stream=usage_in_stream)
        self.alternatives = alternatives
        self._echo = {}
        for job, text in (echoed or {}).items():
            for number in range(job.count):
                choice = self.choices[self._first[job] + number]
                choice.text = self._echo[choice.index] = text

    def opening(self) -> Iterator[dict[str, Any]]:
        for index, text in self._echo.items():
            yield self._envelope(self.chunk_object, [self.chunk_choice(self.choices[index], text, ())])

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        return self.chunk_choice(choice, choice.text, choice.scored)

    def chunk_choice(self, choice: Choice, text: str, scored: Sequence[Scored], start: int = 0) -> dict[str, Any]:
        logprobs = None if self.alternatives is None else self._logprobs(scored, start)
        return {"index": choice.index, "text": text, "logprobs": logprobs, "finish_reason": choice.ended}

    def _logprobs(self, scored: Sequence[Scored], start: int) -> dict[str, Any]:
        ends = itertools.accumulate((len(one.text) for one in scored), initial=start)
        return {
            "tokens": [self.names.name(one.token) for one in scored],
            "token_logprobs": [one.log_probability for one in scored],
            "top_logprobs": [self._best(one) for one in scored] if self.alternatives else None,
            "text_offset": [begin for begin, _ in zip(ends, scored, strict=False)],
            "token_ids": [one.token for one in scored],  # not in OpenAI's API
        }

    def _best(self, one: Scored) -> dict[str, float] | None:
        if one.log_probability is None:
            return None
        return {self.names.name(token): value for token, value in one.alternatives}


class ChatReply(Reply):
    """`/v1/chat/completions`."""

    id_prefix, whole_object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def opening(self) -> Iterator[dict[str, Any]]:
        for choice in self.choices:
            yield self._envelope(self.chunk_object, [self._chunk(choice, {"role": "assistant", "content": ""}, None)])

    def whole_choice(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        logprobs = self._logprobs(choice.scored)
        return {"index": choice.index, "message": message, "logprobs": logprobs, "finish_reason": choice.ended}

    def chunk_choice(self, choice: Choice, text: str, scored: Sequence[Scored], start: int = 0) -> dict[str, Any]:
        del start
        return self._chunk(choice, {"content": text} if text else {}, self._logprobs(scored))

    def trimmed(self, choice: Choice, text: str) -> str:
        """Without the space between the role and what is said."""
        return text if choice.text else text.lstrip()

    def _chunk(self, choice: Choice, delta: dict[str, Any], logprobs: dict[str, Any] | None) -> dict[str, Any]:
        return {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": choice.ended}

    def _logprobs(self, scored: Sequence[Scored]) -> dict[str, Any] | None:
        if all(job.alternatives is None for job in self.jobs):
            return None
        content = [
            self._token(one.token, one.log_probability)
            | {"top_logprobs": [self._token(token, value) for token, value in one.alternatives]}
            for one in scored
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, log_probability: float | None) -> dict[str, Any]:
        return {
            "token": self.names.name(token),
            "logprob": log_probability,
            "bytes": list(self.names.encoded(token)),
        }
