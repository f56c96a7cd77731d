"""The service: what each route answers, in the shapes of OpenAI's API."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from logdepth.data import Tokenizer
from logdepth.decoding import SamplingConfig
from logdepth.errors import UserError
from logdepth.generate import prompt_tokens
from logdepth.serve.anatomy import anatomy_of, weighted_memories, weights_read
from logdepth.serve.chat import STOPS, chat_prompt
from logdepth.serve.config import ServeConfig
from logdepth.serve.delivery import Delivery
from logdepth.serve.engine import Engine
from logdepth.serve.jobs import Event, Failed, Job, PromptRead, TextAdded
from logdepth.serve.metrics import Metrics
from logdepth.serve.replies import ChatReply, CompletionReply, Reply, TokenNames
from logdepth.serve.requests import ChatRequest, CompletionRequest, ForkRequest, ReadRequest, Sampling, StateRequest
from logdepth.serve.responses import ApiError, EventStream, Write, as_event, json_response
from logdepth.serve.saved_states import SavedState, SavedStates

COMPLETION_TOKENS, CHAT_TOKENS = 16, 256
"""Maximum number of tokens of a text where the client does not say."""
PAGE_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
)
"""What the playground may load: itself, and answers of this server."""
SHORT_TEXT = 2_000
"""Characters that are encoded at once; the event loop must not wait for longer texts."""


class Service:
    """One model behind an engine, and what clients may ask of it."""

    def __init__(self, name: str, engine: Engine, config: ServeConfig, metrics: Metrics) -> None:
        """
        Args:
            name: of the model.
            engine: not started yet.
            config: limits.
            metrics: to count in.
        """
        self.name, self.engine, self.config, self.metrics = name, engine, config, metrics
        self.tokenizer: Tokenizer = engine.tokenizer
        self.names = TokenNames(engine.tokenizer)
        self.delivery = Delivery(engine)
        self.states = SavedStates(config.max_states, config.saved_bytes)
        self.created = int(time.time())
        self.anatomy = anatomy_of(engine.model, low=engine.low)
        self.is_draining: Callable[[], bool] = lambda: False
        self._num_texts = 0

    async def models(self) -> Response:
        """`GET /v1/models`."""
        return json_response({"object": "list", "data": [self._model()]})

    async def model(self, name: str) -> Response:
        """`GET /v1/models/{name}`."""
        self._check_model(name)
        return json_response(self._model())

    async def health(self) -> Response:
        """`GET /health`."""
        if not self.delivery.is_alive:
            return json_response({"status": "the engine has stopped"}, 500)
        draining = self.is_draining()
        return json_response({"status": "draining" if draining else "ok"}, 503 if draining else 200)

    async def metrics_page(self) -> Response:
        """`GET /metrics`."""
        page = self.metrics.page(self.engine, self.states, self._num_texts)
        return Response(page, media_type="text/plain; version=0.0.4")

    async def completions(self, body: CompletionRequest, request: Request) -> Response:
        """`POST /v1/completions`."""
        self._check(body)
        saved = None if body.state is None else self.states.get(_owner(request), body.state)
        limit = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
        sampling = self._sampling(body, limit) if limit else None
        prompts = await self._prompts(body.prompt, saved)
        jobs = [
            Job(
                tokens=tokens,
                start=None if saved is None else saved.snapshot,
                sampling=sampling,
                count=body.n or 1,
                alternatives=body.logprobs,
                prompt_alternatives=(body.logprobs or 0) if body.echo and body.logprobs is not None else None,
            )
            for tokens in prompts
        ]
        if not limit and body.logprobs is None:  # there is nothing to do but to repeat the prompt
            jobs = [replace(job, prompt_alternatives=0) for job in jobs]
        scored = jobs[0].prompt_alternatives is not None
        echoed = {} if not body.echo or scored else dict(zip(jobs, self._texts(body.prompt, prompts), strict=True))
        reply = CompletionReply(
            self.name,
            jobs,
            self.names,
            usage_in_stream=_usage_in_stream(body),
            echoed=echoed,
            alternatives=body.logprobs,
        )
        return await self._answer(reply, jobs, stream=bool(body.stream))

    async def chat(self, body: ChatRequest, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        del request
        self._check(body)
        limit = body.max_completion_tokens or body.max_tokens or CHAT_TOKENS
        sampling = self._sampling(body, limit, STOPS)
        job = Job(
            tokens=await self._encoded(chat_prompt(body.messages), "messages"),
            sampling=sampling,
            count=body.n or 1,
            alternatives=(body.top_logprobs or 0) if body.logprobs else None,
        )
        reply = ChatReply(self.name, [job], self.names, usage_in_stream=_usage_in_stream(body))
        return await self._answer(reply, [job], stream=bool(body.stream))

    async def save_state(self, body: StateRequest, request: Request) -> Response:
        """`POST /v1/states`."""
        if body.model is not None:
            self._check_model(body.model)
        self.states.refuse_if_full()
        saved = None if body.state is None else self.states.get(_owner(request), body.state)
        (tokens,) = await self._prompts(body.prompt, saved)
        job = Job(tokens=tokens, start=None if saved is None else saved.snapshot, keep=True)
        return await self._saved(job, request)

    async def read(self, body: ReadRequest) -> Response:
        """`POST /v1/read`."""
        if body.model is not None:
            self._check_model(body.model)
        (tokens,) = await self._prompts(body.prompt, None)
        known = np.array((body.known or [])[: len(tokens)], dtype=np.int64)
        differing = np.flatnonzero(known != tokens[: len(known)])
        job = Job(
            tokens=tokens,
            prompt_alternatives=body.alternatives,
            known=int(differing[0]) if differing.size else len(known),
            slopes=body.weights,
        )
        self._check_length([job])
        release = self._reserved([job])
        if body.stream:

            async def stream(write: Write) -> None:
                try:
                    await self._read(job, lambda chunk: write(as_event(chunk)))
                    await write(b"data: [DONE]\n\n")
                except ApiError as error:
                    await write(as_event(error.body()))

            return EventStream(stream, release)
        chunks: list[dict[str, Any]] = []

        async def keep(chunk: dict[str, Any]) -> None:
            chunks.append(chunk)

        try:
            await self._read(job, keep)
        finally:
            release()
        whole = {"object": "read", "model": self.name, "total": len(tokens), "chunks": chunks}
        return json_response(whole)

    async def _read(self, job: Job, on_chunk: Callable[[dict[str, Any]], Awaitable[None]]) -> None:
        """Have a prompt read; each stretch of it is a chunk."""
        begun, at = time.monotonic(), None
        memories = weighted_memories(self.engine.model)
        async with self._in_time(), self.delivery.opened([job]) as channel:
            while events := await channel.next():
                for event in events:
                    read = _succeeded(event)
                    assert isinstance(read, PromptRead)
                    first = read.num_read - len(read.scored)
                    weights = [
                        weights_read(layer, slopes, first) for layer, slopes in zip(memories, read.slopes, strict=False)
                    ]
                    at = time.monotonic()
                    await on_chunk(
                        {
                            "object": "read.chunk",
                            "total": len(job.tokens),
                            "start": first,
                            "seconds": round(at - begun, 6),
                            "state_bytes": read.state_bytes,
                            "tokens": [one.token for one in read.scored],
                            "texts": [one.text for one in read.scored],
                            "nats": [one.log_probability and -one.log_probability for one in read.scored],
                            "alternatives": [
                                [[self.names.name(token), value] for token, value in one.alternatives]
                                for one in read.scored
                            ],
                            "weights": weights,
                        }
                    )

    async def list_states(self, request: Request) -> Response:
        """`GET /v1/states`."""
        found = [one.body(self.name) for one in self.states.all(_owner(request))]
        return json_response({"object": "list", "data": found})

    async def state(self, name: str, request: Request) -> Response:
        """`GET /v1/states/{name}`."""
        return json_response(self.states.get(_owner(request), name).body(self.name))

    async def fork_state(self, name: str, request: Request, body: ForkRequest | None = None) -> Response:
        """`POST /v1/states/{name}/fork`. With fewer tokens, it resumes from the nearest state that is kept."""
        saved = self.states.get(_owner(request), name)
        count = len(saved.tokens) if body is None or body.tokens is None else body.tokens
        if count > len(saved.tokens):
            raise ApiError(400, f"the state has {len(saved.tokens):,} tokens; got {count:,}", param="tokens")
        if count == len(saved.tokens):
            fork = self.states.save(saved.owner, saved.tokens, saved.snapshot)
            return json_response(fork.body(self.name) | {"read_tokens": 0})
        self.states.refuse_if_full()
        return await self._saved(Job(tokens=saved.tokens[:count], keep=True), request)

    async def delete_state(self, name: str, request: Request) -> Response:
        """`DELETE /v1/states/{name}`."""
        self.states.delete(_owner(request), name)
        return json_response({"id": name, "object": "state", "deleted": True})

    async def playground(self) -> Response:
        """`GET /`: a page for browsers, which asks nobody but this server."""
        page = resources.files("logdepth.serve").joinpath("playground.html").read_text(encoding="utf-8")
        return Response(page, media_type="text/html", headers={"Content-Security-Policy": PAGE_POLICY})

    def _model(self) -> dict[str, Any]:
        facts = {"max_length": self.config.max_length, "vocab_size": self.tokenizer.vocab_size}
        model = {"id": self.name, "object": "model", "created": self.created, "owned_by": "logdepth"}
        return model | {"logdepth": facts | self.anatomy.body()}

    def _check_model(self, name: str) -> None:
        if name != self.name:
            message = f"the model '{name}' does not exist; this server has '{self.name}'"
            raise ApiError(404, message, param="model", code="model_not_found")

    def _check(self, body: Sampling) -> None:
        self._check_model(body.model)
        for name, what in body.refused().items():
            raise ApiError(400, f"{name} {what}", param=name, code="unsupported_parameter")

    def _sampling(self, body: Sampling, max_tokens: int, stops: tuple[str, ...] = ()) -> SamplingConfig:
        if max_tokens > self.config.max_length:
            message = f"a text may have at most {self.config.max_length:,} tokens; got {max_tokens:,}"
            raise ApiError(400, message, param="max_tokens", code="context_length_exceeded")
        given = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
        return SamplingConfig(
            max_tokens=max_tokens,
            temperature=1.0 if body.temperature is None else body.temperature,
            top_k=body.top_k,
            top_p=body.top_p,
            min_p=body.min_p or None,
            repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
            # All whole numbers of 64 bits are seeds in OpenAI's API.
            seed=secrets.randbits(63) if body.seed is None else body.seed % 2**63,
            stop=(*given, *stops),
        )

    async def _prompts(self, prompt: Any, saved: SavedState | None) -> list[NDArray[np.int32]]:
        """The tokens of each prompt, after those of a saved state."""
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        found = []
        for one in prompt if several else [prompt]:
            if isinstance(one, str):
                tokens = await self._encoded(one, "prompt", or_nothing=saved is not None)
            else:
                tokens = np.array(one, dtype=np.int64)
                wrong = tokens[tokens >= self.tokenizer.vocab_size]
                if wrong.size:
                    limit = self.tokenizer.vocab_size - 1
                    raise ApiError(400, f"tokens must be from 0 to {limit}; got {wrong[0]}", param="prompt")
                tokens = tokens.astype(np.int32)
            found.append(tokens if saved is None else np.concatenate([saved.tokens, tokens]))
        return found

    async def _encoded(self, text: str, param: str, *, or_nothing: bool = False) -> NDArray[np.int32]:
        """The tokens of a text; an empty one starts a document, where it may not stand for nothing."""

        def encode() -> NDArray[np.int32]:
            if or_nothing and not text:
                return np.zeros(0, dtype=np.int32)
            return np.array(prompt_tokens(self.tokenizer, text, self.engine.separated), dtype=np.int32)

        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ApiError(400, f"{param} holds half a surrogate pair, which is no character", param=param)
        try:
            return encode() if len(text) <= SHORT_TEXT else await asyncio.to_thread(encode)
        except UserError:
            raise ApiError(400, "the prompt is empty, and this model cannot start from nothing", param=param) from None

    def _texts(self, prompt: Any, tokens: Sequence[NDArray[np.int32]]) -> list[str]:
        """The prompts as texts."""
        several = isinstance(prompt, list) and not isinstance(prompt[0], int)
        given = prompt if several else [prompt]
        return [
            one if isinstance(one, str) else self.tokenizer.decode(some.tolist())
            for one, some in zip(given, tokens, strict=True)
        ]

    def _check_length(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            if job.longest > self.config.max_length:
                message = (
                    f"the prompt has {len(job.tokens):,} tokens and the text up to {job.longest - len(job.tokens):,}; "
                    f"together they may be at most {self.config.max_length:,}"
                )
                raise ApiError(400, message, param="prompt", code="context_length_exceeded")

    def _reserved(self, jobs: Sequence[Job]) -> Callable[[], None]:
        """Count the texts of the jobs among those that are under way; what is returned ends that."""
        texts = sum(job.count for job in jobs)
        if texts > self.config.max_concurrent or max(job.count for job in jobs) > self.config.max_texts:
            most = min(self.config.max_concurrent, self.config.max_texts)
            raise ApiError(400, f"a request may ask for at most {most:,} texts; got {texts:,}", param="n")
        if self._num_texts + texts > self.config.max_concurrent:
            most = self.config.max_concurrent
            message = f"{self._num_texts:,} texts are under way, and at most {most:,} may be; try again later"
            raise ApiError(429, message, code="rate_limit_exceeded", headers={"Retry-After": "1"})
        self._num_texts += texts

        def release() -> None:
            self._num_texts -= texts

        return release

    async def _answer(self, reply: Reply, jobs: Sequence[Job], *, stream: bool) -> Response:
        self._check_length(jobs)
        release = self._reserved(jobs)
        if stream:
            return EventStream(partial(self._stream, reply, jobs), release)
        try:
            await self._run(reply, jobs)
        finally:
            release()
        return json_response(reply.whole())

    async def _stream(self, reply: Reply, jobs: Sequence[Job], write: Write) -> None:
        """Write a reply in chunks. What has come together is written together."""

        async def write_chunks(chunks: Iterable[Mapping[str, Any]]) -> None:
            if data := b"".join(map(as_event, chunks)):
                await write(data)

        try:
            await write_chunks(reply.opening())
            await self._run(reply, jobs, write_chunks)
            await write_chunks(reply.closing())
            await write(b"data: [DONE]\n\n")
        except ApiError as error:  # the status has gone out already
            await write(as_event(error.body()))

    async def _run(
        self, reply: Reply, jobs: Sequence[Job], on_chunks: Callable[[list[Any]], Awaitable[None]] | None = None
    ) -> None:
        """Have the jobs done."""
        begun, first = time.monotonic(), True
        async with self._in_time(), self.delivery.opened(jobs) as channel:
            while events := await channel.next():
                chunks = [chunk for event in events for chunk in reply.take(_succeeded(event))]
                if first and any(isinstance(event, TextAdded) for event in events):
                    self.metrics.first_texts += 1
                    self.metrics.first_text_seconds += time.monotonic() - begun
                    first = False
                if on_chunks is not None:
                    await on_chunks(chunks)

    async def _saved(self, job: Job, request: Request) -> Response:
        """Read a prompt and save the state after it."""
        self._check_length([job])
        release = self._reserved([job])
        try:
            async with self._in_time(), self.delivery.opened([job]) as channel:
                while events := await channel.next():
                    read = _succeeded(events[-1])
        finally:
            release()
        assert isinstance(read, PromptRead)
        assert read.snapshot is not None
        saved = self.states.save(_owner(request), np.asarray(job.tokens, dtype=np.int32), read.snapshot)
        return json_response(saved.body(self.name) | {"read_tokens": len(job.tokens) - read.num_cached})

    @asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        """A scope that is left with an error when a request has taken too long."""
        seconds = self.config.request_seconds
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            message = f"the request took longer than {seconds:g} s"
            raise ApiError(408, message, code="request_timeout") from None


def _succeeded(event: Event) -> PromptRead | TextAdded:
    if isinstance(event, Failed):
        raise ApiError(500, f"the server failed: {event.reason}", code="internal_error")
    return event


def _owner(request: Request) -> int | None:
    owner: int | None = request.state.owner
    return owner


def _usage_in_stream(body: Sampling) -> bool:
    return body.stream_options is not None and body.stream_options.include_usage
