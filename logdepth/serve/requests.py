"""What clients may send. Fields are those of OpenAI's API; the few others are marked.

A field that is not listed is an error. A field that this server cannot honour is refused unless it asks for nothing.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_STOPS = 16
MAX_ALTERNATIVES = 20
LARGEST = 2**63 - 1

Count = Annotated[int, Field(ge=1, le=128)]
# One error is enough to refuse a list, and there may be millions.
Tokens = Annotated[list[Annotated[int, Field(ge=0, le=LARGEST)]], Field(min_length=1, fail_fast=True)]
Texts = Annotated[list[str], Field(min_length=1, fail_fast=True)]
Prompt = str | Tokens | Texts | Annotated[list[Tokens], Field(min_length=1, fail_fast=True)]
Stop = Annotated[str, Field(min_length=1)]
Stops = Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None


class Strict(BaseModel):
    """Values must have their types, and all fields must be known."""

    model_config = ConfigDict(strict=True, extra="forbid")


class StreamOptions(Strict):
    include_usage: bool = False
    """Whether a last chunk says how many tokens there were."""
    include_obfuscation: bool | None = None
    """Ignored."""


class Sampling(Strict):
    """What all requests for texts have."""

    model: str
    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    """Not in OpenAI's API."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Not in OpenAI's API."""
    repetition_penalty: Annotated[float, Field(gt=0, le=1000)] | None = None
    """Not in OpenAI's API."""
    n: Count | None = None
    seed: Annotated[int, Field(ge=-LARGEST - 1, le=LARGEST)] | None = None
    stop: Stops = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    """Ignored."""
    metadata: dict[str, str] | None = None
    """Ignored."""
    store: bool | None = None

    def refused(self) -> dict[str, str]:
        """Fields that ask for what there is not, and what to do instead."""
        found = {}
        for name in ("presence_penalty", "frequency_penalty"):
            if getattr(self, name):
                found[name] = "is not supported; use repetition_penalty"
        if self.logit_bias:
            found["logit_bias"] = "is not supported; leave it out"
        if self.store:
            found["store"] = "is not supported: nothing is stored; leave it out"
        if self.stream_options is not None and not self.stream:
            found["stream_options"] = "needs stream to be true"
        return found


class CompletionRequest(Sampling):
    """`POST /v1/completions`."""

    prompt: Prompt = ""
    max_tokens: Annotated[int, Field(ge=0, le=LARGEST)] | None = None
    """By default 16."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    echo: bool | None = None
    best_of: Count | None = None
    suffix: str | None = None
    state: str | None = None
    """The id of a saved state, after which the prompt begins. Not in OpenAI's API."""

    def refused(self) -> dict[str, str]:
        found = super().refused()
        if self.best_of not in (None, self.n or 1):
            found["best_of"] = "is not supported unless it equals n; leave it out and choose among n texts"
        if self.suffix:
            found["suffix"] = "is not supported: this model only continues; leave it out"
        if self.max_tokens == 0 and not self.echo:
            found["max_tokens"] = "must be at least 1, or echo must be true"
        if self.max_tokens == 0 and (self.n or 1) > 1:
            found["n"] = "must be 1 where max_tokens is 0"
        if self.state is not None and self.echo:
            found["echo"] = "cannot be given with state: the text before a state is not kept"
        if self.state is not None and isinstance(self.prompt, list) and not isinstance(self.prompt[0], int):
            found["prompt"] = "must be one text, or one list of tokens, where state is given"
        return found


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: str | None = None
    """Ignored."""
    refusal: None = None
    """Ignored: clients send back what they were sent."""

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ResponseFormat(Strict):
    type: Literal["text"]


class ChatRequest(Sampling):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    """By default 256."""
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] | None = None
    response_format: ResponseFormat | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    """Ignored: there are no tools."""

    def refused(self) -> dict[str, str]:
        found = super().refused()
        if self.tools:
            found["tools"] = "is not supported; leave it out"
        if self.tool_choice not in (None, "none", "auto"):
            found["tool_choice"] = "is not supported; leave it out"
        if self.top_logprobs is not None and not self.logprobs:
            found["top_logprobs"] = "needs logprobs to be true"
        given = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(given) > 1:
            found["max_tokens"] = "and max_completion_tokens differ; give one of them"
        return found


class StateRequest(Strict):
    """`POST /v1/states`: what to read and save the state of."""

    prompt: str | Tokens = ""
    state: str | None = None
    """The id of a saved state, after which the prompt begins."""
    model: str | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> "StateRequest":
        if not self.prompt and self.state is None:
            raise ValueError("give a prompt, a state, or both")
        return self


class ReadRequest(Strict):
    """`POST /v1/read`: a text as the model reads it, token by token."""

    prompt: str | Tokens = ""
    model: str | None = None
    known: Annotated[list[Annotated[int, Field(ge=0, le=LARGEST)]], Field(fail_fast=True)] | None = None
    """Tokens of an earlier answer. What they have in common with the prompt at its beginning is left out where a state
    after it is kept."""
    alternatives: Annotated[int, Field(ge=0, le=MAX_ALTERNATIVES)] = 0
    """For each token, give so many likely ones."""
    weights: bool = False
    """Whether to give the weights of the blocks that each token reads."""
    stream: bool | None = None


class ForkRequest(Strict):
    """`POST /v1/states/{id}/fork`: another state with the same tokens, or the first of them."""

    tokens: Annotated[int, Field(ge=1, le=LARGEST)] | None = None
    """Roll back to so many tokens; by default all."""
