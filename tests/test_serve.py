"""The server over HTTP: answers in OpenAI's shapes, with the texts that `generate` gives."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
import torch

from logdepth.data import Tokenizer, prepare
from logdepth.decoding import SamplingConfig
from logdepth.generate import generate
from logdepth.models import LM
from logdepth.serve.chat import STOPS, chat_prompt
from logdepth.serve.requests import Message
from tests.decoders import built
from tests.serving import NAME, Running, serving
from tests.tiny_corpus import tiny_data

PROMPT = "the cat sees a small dog in the garden ."


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> Tokenizer:
    return prepare(tiny_data(corpus)).tokenizer


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> LM:
    return built("hybrid", tokenizer.vocab_size)


@pytest.fixture(scope="module")
def running(model: LM, tokenizer: Tokenizer) -> Iterator[Running]:
    with serving(model, tokenizer) as running:
        yield running


@pytest.fixture
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def generated(model: LM, tokenizer: Tokenizer, prompt: str, **settings: Any) -> str:
    config = SamplingConfig(**{"max_tokens": 16, **settings})
    return "".join(piece.text for piece in generate(model, tokenizer, [prompt], config))


@pytest.mark.parametrize(
    "settings",
    [
        {"seed": 3},
        {"temperature": 0.0},
        {"seed": 1, "top_p": 0.7, "temperature": 1.5, "max_tokens": 30},
        {"seed": 2, "top_k": 3, "min_p": 0.2, "repetition_penalty": 1.3},
        {"seed": 4, "stop": ("e", "g"), "max_tokens": 40},
    ],
)
@pytest.mark.parametrize("prompt", [PROMPT, ""])
def test_a_text_is_that_of_generate(
    running: Running, model: LM, tokenizer: Tokenizer, prompt: str, settings: dict[str, Any]
) -> None:
    expected = generated(model, tokenizer, prompt, **settings)
    sent = {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}
    answer = running.complete(prompt, **sent)
    assert [one["text"] for one in answer["choices"]] == [expected]
    assert answer["object"] == "text_completion"
    assert answer["model"] == NAME
    usage = answer["usage"]
    assert usage["prompt_tokens"] == max(1, len(tokenizer.encode(prompt)))
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    ended = answer["choices"][0]["finish_reason"]
    assert ended == ("length" if usage["completion_tokens"] == sent.get("max_tokens", 16) else "stop")
    chunks = running.streamed("/v1/completions", prompt=prompt, **sent)
    assert "".join(one["choices"][0]["text"] for one in chunks) == expected
    assert chunks[-1]["choices"][0]["finish_reason"] == ended


def test_several_prompts_and_texts(running: Running, tokenizer: Tokenizer) -> None:
    prompts = [PROMPT, "my", "every bird"]
    answer = running.complete(prompts, n=2, seed=7, max_tokens=5)
    assert [one["index"] for one in answer["choices"]] == list(range(6))
    texts = [one["text"] for one in answer["choices"]]
    assert len(set(texts)) == 6
    for number, prompt in enumerate(prompts):
        assert [one["text"] for one in running.complete(prompt, n=2, seed=7, max_tokens=5)["choices"]] == (
            texts[2 * number : 2 * number + 2]
        )
    tokens = [tokenizer.encode(prompt) for prompt in prompts]
    assert [one["text"] for one in running.complete(tokens, n=2, seed=7, max_tokens=5)["choices"]] == texts
    assert running.text(tokens[1], seed=7, max_tokens=5) == texts[2]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens))
    assert 6 < answer["usage"]["completion_tokens"] <= 30
    found = [""] * 6
    for chunk in running.streamed("/v1/completions", prompt=prompts, n=2, seed=7, max_tokens=5):
        for one in chunk["choices"]:
            found[one["index"]] += one["text"]
    assert found == texts


def test_without_a_seed_texts_differ(running: Running) -> None:
    assert len({running.text(PROMPT, max_tokens=12) for _ in range(3)}) == 3
    assert running.text(PROMPT, seed=-1) == running.text(PROMPT, seed=2**63 - 1)


def test_probabilities_of_tokens(running: Running, model: LM, tokenizer: Tokenizer) -> None:
    (choice,) = running.complete(PROMPT, max_tokens=6, seed=1, logprobs=2)["choices"]
    found = choice["logprobs"]
    assert len(found["tokens"]) == 6
    assert "".join(found["tokens"]).lstrip() == choice["text"].lstrip()
    assert found["text_offset"][0] == 0
    assert all(choice["text"][at:].lstrip() for at in found["text_offset"])
    assert all((len(best) == 2 and max(best.values()) == max(*best.values(), own)) or own < min(best.values())
               for own, best in zip(found["token_logprobs"], found["top_logprobs"], strict=True))  # fmt: skip
    names = {tokenizer.processor.id_to_piece(number).replace("\u2581", " "): number for number in range(96)}
    tokens = [*tokenizer.encode(PROMPT), *(names[name] for name in found["tokens"])]
    with torch.no_grad():
        logs = model(torch.tensor([tokens]))[0].log_softmax(dim=-1)
    expected = [float(logs[place - 1, tokens[place]]) for place in range(len(tokens) - 6, len(tokens))]
    assert found["token_logprobs"] == pytest.approx(expected, abs=1e-6)
    streamed = running.streamed("/v1/completions", prompt=PROMPT, max_tokens=6, seed=1, logprobs=2)
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [one for chunk in streamed for one in chunk["choices"][0]["logprobs"][name]]
        if name in ("tokens", "text_offset"):
            assert joined == found[name]
        elif name == "token_logprobs":
            assert joined == pytest.approx(found[name])
    assert running.complete(PROMPT, max_tokens=1, logprobs=0)["choices"][0]["logprobs"]["top_logprobs"] is None


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [None, 0, 1])
@pytest.mark.parametrize("max_tokens", [0, 3])
def test_the_prompt_is_echoed(
    running: Running, tokenizer: Tokenizer, max_tokens: int, logprobs: int | None, stream: bool
) -> None:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "echo": True, "logprobs": logprobs, "seed": 1}
    text = PROMPT + ("" if not max_tokens else running.text(PROMPT, max_tokens=3, seed=1))
    if stream:
        chunks = running.streamed("/v1/completions", **body)
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
        assert chunks[-1]["choices"][0]["finish_reason"] == "length"
        return
    answer = running.complete(**body)
    assert answer["choices"][0]["text"] == text
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == max_tokens
    if logprobs is not None:
        found = answer["choices"][0]["logprobs"]
        prompt = len(tokenizer.encode(PROMPT))
        assert len(found["tokens"]) == prompt + max_tokens
        assert found["token_logprobs"][0] is None
        assert all(value < 0 for value in found["token_logprobs"][1:])
        assert text[found["text_offset"][prompt - 1] :].lstrip().startswith(found["tokens"][prompt - 1].strip())


def test_echo_of_tokens_is_their_text(running: Running, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(PROMPT)
    assert running.text([tokens], max_tokens=0, echo=True) == PROMPT
    assert running.text(tokens, max_tokens=2, echo=True, seed=1).startswith(PROMPT)
    answer = running.complete([PROMPT, "my"], max_tokens=2, echo=True, n=2)
    assert [one["text"].startswith(("the cat", "my")[one["index"] // 2]) for one in answer["choices"]] == [True] * 4


def test_chats(running: Running, model: LM, tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "be a cat"},
        {"role": "user", "content": [{"type": "text", "text": "the cat "}, {"type": "text", "text": "sees"}]},
        {"role": "assistant", "content": "a dog"},
        {"role": "user", "content": "draws"},
    ]
    prompt = "System: be a cat\nUser: the cat sees\nAssistant: a dog\nUser: draws\nAssistant:"
    assert chat_prompt([Message.model_validate(one) for one in messages]) == prompt
    expected = generated(model, tokenizer, prompt, max_tokens=20, seed=2, stop=("q", *STOPS))
    body = {"messages": messages, "max_tokens": 20, "seed": 2, "stop": "q"}
    answer = running.post("/v1/chat/completions", model=NAME, **body)
    (choice,) = answer["choices"]
    assert choice["message"] == {"role": "assistant", "content": expected.lstrip(), "refusal": None}
    assert answer["object"] == "chat.completion"
    assert answer["usage"]["prompt_tokens"] == len(tokenizer.encode(prompt))
    first, *chunks = running.streamed("/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    *chunks, last = chunks
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == expected.lstrip()
    assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]


def test_an_answer_ends_where_another_role_begins(running: Running) -> None:
    """Of a model that says User: soon enough, when it must."""
    assert all(stop.strip() in ("User:", "System:", "Assistant:") for stop in STOPS)
    body = {"messages": [{"role": "user", "content": "the"}], "max_tokens": 200, "seed": 1, "temperature": 2.0}
    answer = running.post("/v1/chat/completions", model=NAME, **body)
    assert not any(stop in answer["choices"][0]["message"]["content"] for stop in STOPS)


def test_the_client_of_openai(running: Running, client: openai.OpenAI, model: LM, tokenizer: Tokenizer) -> None:
    assert [one.id for one in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).owned_by == "logdepth"
    done = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=6, seed=5, n=2, logprobs=1, stop=["zz"])
    assert done.choices[0].text == generated(model, tokenizer, PROMPT, max_tokens=6, seed=5)
    assert done.usage.completion_tokens == 12
    assert len(done.choices[1].logprobs.tokens) == 6
    pieces = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=6, seed=5, stream=True, stream_options={"include_usage": True}
    )
    *pieces, last = pieces
    assert "".join(piece.choices[0].text for piece in pieces) == done.choices[0].text
    assert last.usage.total_tokens == last.usage.prompt_tokens + 6
    messages: Any = [{"role": "user", "content": "the cat"}]
    chat = client.chat.completions.create(
        model=NAME, messages=messages, max_completion_tokens=5, seed=1, logprobs=True, top_logprobs=2
    )
    assert chat.choices[0].message.role == "assistant"
    assert len(chat.choices[0].logprobs.content) == 5
    assert len(chat.choices[0].logprobs.content[0].top_logprobs) == 2
    streamed = client.chat.completions.create(model=NAME, messages=messages, max_tokens=5, seed=1, stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in streamed) == chat.choices[0].message.content
    extra = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=6, seed=2, extra_body={"top_k": 1})
    assert extra.choices[0].text == generated(model, tokenizer, PROMPT, max_tokens=6, temperature=0.0)
    with pytest.raises(openai.NotFoundError, match="the model 'gpt' does not exist; this server has 'tiny'"):
        client.completions.create(model="gpt", prompt="the")
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=NAME, messages=messages, presence_penalty=1.0)
    assert (refused.value.param, refused.value.code) == ("presence_penalty", "unsupported_parameter")


REFUSED: list[tuple[dict[str, Any], str | None, str]] = [
    ({"model": 3}, "model", "valid string"),
    ({"prompt": []}, "prompt", "must be a text or a list of tokens"),
    ({"prompt": [[1], []]}, "prompt", "must be a text or a list of tokens"),
    ({"prompt": [1, "a"]}, "prompt", "must be a text or a list of tokens"),
    ({"prompt": None}, "prompt", "must be a text or a list of tokens"),
    ({"prompt": [5, 96]}, "prompt", "tokens must be from 0 to 95; got 96"),
    ({"prompt": [5, 2**62]}, "prompt", "tokens must be from 0 to 95"),
    ({"prompt": [-1]}, "prompt", "must be a text"),
    ({"prompt": "\ud800"}, "prompt", "half a surrogate pair"),
    ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
    ({"max_tokens": 0}, "max_tokens", "must be at least 1, or echo must be true"),
    ({"max_tokens": 1.5}, "max_tokens", "valid integer"),
    ({"max_tokens": "5"}, "max_tokens", "valid integer"),
    ({"max_tokens": 200}, "max_tokens", "at most 150 tokens; got 200"),
    ({"prompt": "a " * 100, "max_tokens": 100}, "prompt", "together they may be at most 150"),
    ({"max_tokens": 10**30}, "max_tokens", "less than or equal"),
    ({"temperature": 2.1}, "temperature", "less than or equal to 2"),
    ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
    ({"temperature": math.nan}, "temperature", "finite number"),
    ({"top_p": 0}, "top_p", "greater than 0"),
    ({"top_k": 0}, "top_k", "greater than or equal to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"n": 129}, "n", "less than or equal to 128"),
    ({"n": True}, "n", "valid integer"),
    ({"n": 5}, "n", "at most 4 texts; got 5"),
    ({"prompt": ["a"] * 5}, "n", "at most 4 texts; got 5"),
    ({"best_of": 2}, "best_of", "is not supported unless it equals n"),
    ({"suffix": "x"}, "suffix", "is not supported"),
    ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
    ({"stop": ""}, "stop", "must be a text or at most 16 texts, none of them empty"),
    ({"stop": ["a", 3]}, "stop", "must be a text or at most 16 texts"),
    ({"stop": ["a"] * 17}, "stop", "must be a text or at most 16 texts"),
    ({"seed": 2**63}, "seed", "less than or equal"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "use repetition_penalty"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "is not supported"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "needs stream to be true"),
    ({"store": True}, "store", "nothing is stored"),
    ({"colour": "red"}, "colour", "this field is unknown"),
    ({"state": "state-1"}, "state", "no state with this id"),
    ({"state": "state-1", "prompt": ["a"]}, "prompt", "one list of tokens"),
    ({"state": "state-1", "echo": True}, "echo", "cannot be given with state"),
]


@pytest.fixture(scope="module")
def narrow(model: LM, tokenizer: Tokenizer) -> Iterator[Running]:
    with serving(model, tokenizer, max_length=150, max_concurrent=4, max_body_bytes=20_000) as running:
        yield running


@pytest.mark.parametrize(("body", "param", "message"), REFUSED)
def test_bad_requests_are_refused_and_say_why(
    narrow: Running, body: dict[str, Any], param: str | None, message: str
) -> None:
    content = json.dumps({"model": NAME, "prompt": "the cat", **body})
    status = 404 if message.startswith("no state") else 400
    error = narrow.error(status, "/v1/completions", content=content, headers={"content-type": "application/json"})
    assert message in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": "hi"}, "messages", "valid list"),
        ({"messages": [{"role": "user"}]}, "messages", "messages.0.content: this field is missing"),
        ({"messages": [{"role": "cat", "content": "x"}]}, "messages", "messages.0.role: input should be 'system'"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages", "messages.0.content: must be a text, or parts"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "parts of type text"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "messages.0.role"),
        ({"top_logprobs": 2}, "top_logprobs", "needs logprobs to be true"),
        ({"tools": [{}]}, "tools", "is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format", "'text'"),
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
        ({"prompt": "x"}, "prompt", "this field is unknown"),
    ],
)
def test_bad_chats_are_refused_and_say_why(narrow: Running, body: dict[str, Any], param: str, message: str) -> None:
    sent = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], **body}
    error = narrow.error(400, "/v1/chat/completions", json=sent)
    assert message in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 10_000, b'{"n":' + b"9" * 5000 + b"}", b'"x"', b"{} {}"]
)
@pytest.mark.parametrize("path", ["completions", "chat/completions", "states"])
def test_what_is_no_json_object_is_refused(narrow: Running, path: str, content: bytes) -> None:
    error = narrow.error(400, f"/v1/{path}", content=content, headers={"content-type": "application/json"})
    assert error["type"] == "invalid_request_error"


def test_other_wrong_requests(narrow: Running) -> None:
    assert "no route GET /v2" in narrow.error(404, "/v2", "GET")["message"]
    assert "does not take DELETE" in narrow.error(405, "/v1/completions", "DELETE")["message"]
    assert narrow.error(404, "/v1/models/gpt/4", "GET")["code"] == "model_not_found"
    assert narrow.error(400, "/v1/completions", data={"prompt": "x"})["message"].endswith("sent as application/json")
    large = {"model": NAME, "prompt": "a" * 20_000}
    assert narrow.error(413, "/v1/completions", json=large)["message"] == "the body must not exceed 20,000 bytes"
    assert narrow.error(413, "/v1/completions", content=iter([b"x" * 10_000] * 5))["code"] == "body_too_large"
    assert narrow.text("the cat", max_tokens=1)


def test_a_stream_model_needs_a_prompt(model: LM, tokenizer: Tokenizer) -> None:
    with serving(model, tokenizer, separated=False) as running:
        error = running.error(400, "/v1/completions", json={"model": NAME})
        assert error["message"] == "the prompt is empty, and this model cannot start from nothing"
        assert running.text("the cat", max_tokens=2)


def test_health_and_metrics(running: Running) -> None:
    assert running.client.get("/health").json() == {"status": "ok"}
    before = running.metric("text_tokens_total")
    usage = running.complete("the", max_tokens=7)["usage"]  # the end of a document may come sooner
    page = running.client.get("/metrics")
    assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert running.metric("text_tokens_total") == before + usage["completion_tokens"] > before
    assert running.metric("texts") == running.metric("growing_texts") == 0
    lines = page.text.splitlines()
    for line in lines:
        if not line.startswith("#"):
            name = line.split("{")[0].split()[0]
            assert f"# TYPE {name} counter" in lines or f"# TYPE {name} gauge" in lines
            float(line.rsplit(" ", 1)[1])
    assert running.metric("requests_total") > 0
