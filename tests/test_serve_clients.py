"""Many clients of one server: saved states, keys, limits, clients that go away, an end in order."""

import json
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from logdepth.data import Tokenizer, prepare
from logdepth.decoding import SamplingConfig
from logdepth.generate import generate
from logdepth.models import LM
from tests.decoders import built
from tests.serving import NAME, Running, events, serving, wait_until
from tests.tiny_corpus import tiny_data

PROMPT = "the cat sees a small dog in the garden . every bird follows the old clock under a tree ."
FOREVER = 100_000


@pytest.fixture(scope="module")
def tokenizer(corpus: Path) -> Tokenizer:
    return prepare(tiny_data(corpus)).tokenizer


@pytest.fixture(scope="module")
def model(tokenizer: Tokenizer) -> LM:
    return built("memory-window", tokenizer.vocab_size)


@pytest.fixture(scope="module")
def running(model: LM, tokenizer: Tokenizer) -> Iterator[Running]:
    with serving(model, tokenizer) as running:
        yield running


def test_a_text_continues_a_saved_state(running: Running, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(PROMPT)
    saved = running.post("/v1/states", prompt=tokens[:13], model=NAME)
    assert saved["object"] == "state"
    assert (saved["tokens"], saved["read_tokens"]) == (13, 13)
    assert saved["bytes"] > 13 * 4
    for rest in ([], tokens[13:]):
        body = {"max_tokens": 9, "seed": 3, "n": 2}
        whole = running.complete(tokens[:13] + rest, **body)
        found = running.complete(rest or "", state=saved["id"], **body)
        assert [one["text"] for one in found["choices"]] == [one["text"] for one in whole["choices"]]
        assert found["usage"]["prompt_tokens"] == 13 + len(rest)
        assert found["usage"]["prompt_tokens_details"]["cached_tokens"] >= 13
    chunks = running.streamed("/v1/completions", prompt="", state=saved["id"], max_tokens=9, seed=3)
    assert "".join(one["choices"][0]["text"] for one in chunks) == running.text(tokens[:13], max_tokens=9, seed=3)
    further = running.post("/v1/states", prompt=tokens[13:], state=saved["id"])
    assert (further["tokens"], further["read_tokens"]) == (len(tokens), len(tokens) - 16)  # those of the text before
    assert running.text("", state=further["id"], seed=1) == running.text(tokens, seed=1)
    assert running.client.get(f"/v1/states/{saved['id']}").json()["tokens"] == 13
    ids = {one["id"] for one in running.client.get("/v1/states").json()["data"]}
    assert {saved["id"], further["id"]} <= ids
    assert running.metric("saved_states") == len(ids)


def test_forks_share_everything_and_live_alone(running: Running, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(PROMPT)
    saved = running.post("/v1/states", prompt=PROMPT)
    before = running.service.states.nbytes
    fork = running.post(f"/v1/states/{saved['id']}/fork")
    assert fork["id"] != saved["id"]
    assert (fork["tokens"], fork["read_tokens"]) == (saved["tokens"], 0)
    states = running.service.states
    assert states.get(None, fork["id"]).snapshot is states.get(None, saved["id"]).snapshot
    assert states.nbytes - before == 4 * len(tokens)  # no block twice
    gone = running.client.delete(f"/v1/states/{saved['id']}").json()
    assert gone == {"id": saved["id"], "object": "state", "deleted": True}
    assert running.error(404, f"/v1/states/{saved['id']}", "GET")["code"] == "state_not_found"
    running.error(404, f"/v1/states/{saved['id']}", "DELETE")
    running.error(404, f"/v1/states/{saved['id']}/fork")
    assert running.text("", state=fork["id"], seed=1) == running.text(PROMPT, seed=1)


def test_rolling_back_resumes_from_the_nearest_state_that_is_kept(running: Running, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(PROMPT + PROMPT + PROMPT)
    saved = running.post("/v1/states", prompt=tokens)
    for length in (len(tokens) - 1, 21, 16, 5, 1):
        back = running.post(f"/v1/states/{saved['id']}/fork", tokens=length)
        assert back["tokens"] == length
        assert back["read_tokens"] == length % 8  # stretches have 8 tokens here
        assert running.text("", state=back["id"], seed=1) == running.text(tokens[:length], seed=1)
    error = running.error(400, f"/v1/states/{saved['id']}/fork", json={"tokens": len(tokens) + 1})
    assert f"the state has {len(tokens)} tokens" in error["message"]
    running.error(400, f"/v1/states/{saved['id']}/fork", json={"tokens": 0})


def test_bad_states_are_refused(running: Running) -> None:
    assert running.error(400, "/v1/states", json={})["message"] == "give a prompt, a state, or both"
    assert running.error(404, "/v1/states", json={"state": "x"})["code"] == "state_not_found"
    assert running.error(404, "/v1/states", json={"prompt": "a", "model": "x"})["code"] == "model_not_found"
    assert running.error(400, "/v1/states", json={"prompt": ["a"]})["param"] == "prompt"


def test_states_are_few_and_small_enough(model: LM, tokenizer: Tokenizer) -> None:
    with serving(model, tokenizer, max_states=2) as running:
        first = running.post("/v1/states", prompt="the")["id"]
        running.post(f"/v1/states/{first}/fork")
        for path in ("/v1/states", f"/v1/states/{first}/fork"):
            error = running.error(429, path, json={"prompt": "the"} if path == "/v1/states" else {})
            assert error["code"] == "too_many_states"
        running.client.delete(f"/v1/states/{first}")
        running.post("/v1/states", prompt="the")
    with serving(model, tokenizer, saved_bytes=1000) as running:
        running.post("/v1/states", prompt="the")
        running.error(429, "/v1/states", json={"prompt": "a"})


def test_keys_open_the_server_and_part_its_states(model: LM, tokenizer: Tokenizer) -> None:
    with serving(model, tokenizer, keys=["one", "two"]) as running:
        two = {"Authorization": "Bearer two"}
        saved = running.post("/v1/states", prompt="the cat")["id"]
        for wrong in ({"Authorization": "Bearer three"}, {"Authorization": "one"}, {"Authorization": ""}):
            for method, path in (
                ("GET", "/v1/models"),
                ("GET", "/metrics"),
                ("POST", "/v1/completions"),
                ("GET", "/x"),
            ):
                error = running.error(401, path, method, headers=wrong)
                assert (error["code"], error["type"]) == ("invalid_api_key", "authentication_error")
        assert running.client.get("/v1/models", headers=two).status_code == 200
        assert running.client.get("/health", headers={"Authorization": ""}).json() == {"status": "ok"}
        for method, path in (("GET", f"/v1/states/{saved}"), ("DELETE", f"/v1/states/{saved}")):
            assert running.error(404, path, method, headers=two)["code"] == "state_not_found"
        running.error(404, "/v1/completions", json={"model": NAME, "state": saved}, headers=two)
        assert running.client.get("/v1/states", headers=two).json()["data"] == []
        assert running.client.get(f"/v1/states/{saved}").status_code == 200


@pytest.fixture(scope="module")
def endless(model: LM, tokenizer: Tokenizer) -> Iterator[Running]:
    """A server of texts without an end of their own."""
    with serving(model, tokenizer, separated=False) as running:
        yield running


@contextmanager
def begun(running: Running, **body: object) -> Iterator[httpx.Response]:
    """A streamed text of which the first chunk has come; its client goes away with the scope."""
    sent = {"model": NAME, "prompt": "the", "max_tokens": FOREVER, "stream": True, "seed": 1, **body}
    with running.client.stream("POST", "/v1/completions", json=sent) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        yield response


def test_more_texts_than_there_may_be_are_refused(model: LM, tokenizer: Tokenizer) -> None:
    with serving(model, tokenizer, separated=False, max_concurrent=3) as running:
        with begun(running, n=2):
            error = running.client.post("/v1/completions", json={"model": NAME, "prompt": "a", "n": 2})
            assert (error.status_code, error.headers["retry-after"]) == (429, "1")
            assert error.json()["error"]["message"] == ("2 texts are under way, and at most 3 may be; try again later")
            running.error(429, "/v1/completions", json={"model": NAME, "prompt": ["a", "b"]})
            assert running.text("my", max_tokens=2)
        wait_until(lambda: running.metric("texts") == 0)
        assert len(running.complete("the", n=3)["choices"]) == 3


def test_texts_wait_for_their_turn(model: LM, tokenizer: Tokenizer) -> None:
    with serving(model, tokenizer, max_texts=2) as running, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda seed: running.text(PROMPT, seed=seed, max_tokens=9), range(8)))
        assert found == [running.text(PROMPT, seed=seed, max_tokens=9) for seed in range(8)]


def test_a_client_that_goes_away_frees_its_slot(endless: Running) -> None:
    running = endless
    gone = running.metric("disconnects_total")
    with begun(running, n=3):
        assert running.metric("growing_texts") == 3
    wait_until(lambda: running.metric("growing_texts") == 0)
    body = json.dumps({"model": NAME, "prompt": "the", "max_tokens": FOREVER, "n": 2}).encode()  # not streamed
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", int(running.url.rpartition(":")[2]))) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
        wait_until(lambda: running.metric("growing_texts") == 2)
    wait_until(lambda: running.metric("growing_texts") == 0)
    wait_until(lambda: running.metric("texts") == 0)
    assert running.metric("disconnects_total") == gone + 2


def test_time_is_limited(model: LM, tokenizer: Tokenizer) -> None:
    with serving(model, tokenizer, separated=False, request_seconds=0.5, body_seconds=0.3) as running:
        body = {"model": NAME, "prompt": "the", "max_tokens": FOREVER}
        error = running.error(408, "/v1/completions", json=body)
        assert (error["code"], error["message"]) == ("request_timeout", "the request took longer than 0.5 s")
        with running.client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line]
        assert len(lines) > 1
        assert json.loads(lines[-1].removeprefix("data: "))["error"]["code"] == "request_timeout"
        running.error(408, "/v1/states", json={"prompt": [5] * 20_000})
        wait_until(lambda: running.metric("texts") == 0)

        def slowly() -> Iterator[bytes]:
            yield b'{"model"'
            time.sleep(1.0)
            yield b": 1}"

        error = running.error(408, "/v1/completions", content=slowly())
        assert error["message"] == "the body did not arrive within 0.3 s"
        assert running.text("the", max_tokens=2)


def test_every_text_is_as_alone_whoever_comes_and_goes(running: Running, model: LM, tokenizer: Tokenizer) -> None:
    """Streamed or not, also while others are given up."""
    chance = np.random.default_rng(0)
    words = PROMPT.split()
    plans = [
        (
            " ".join(words[: chance.integers(1, len(words))]),
            {"seed": int(chance.integers(99)), "max_tokens": int(chance.integers(1, 30)), "temperature": 1.5},
            int(chance.integers(4)),
        )
        for _ in range(40)
    ]

    def ask(plan: tuple[str, dict[str, float], int]) -> str | None:
        prompt, settings, how = plan
        if how == 0:
            return running.text(prompt, **settings)
        body = {"model": NAME, "prompt": prompt, "stream": True, **settings}
        pieces = []
        with running.client.stream("POST", "/v1/completions", json=body) as response:
            for number, event in enumerate(events(response)):
                pieces.append(event["choices"][0]["text"])
                if how == 1 and number > 3:
                    response.close()
                    return None
        return "".join(pieces)

    with ThreadPoolExecutor(20) as pool:
        found = list(pool.map(ask, plans))
    assert 2 < found.count(None) < 30
    for (prompt, settings, _), text in zip(plans, found, strict=True):
        if text is not None:
            pieces = generate(model, tokenizer, [prompt], SamplingConfig(**settings))
            assert text == "".join(piece.text for piece in pieces)
    wait_until(lambda: running.metric("texts") == 0)


def test_a_second_prompt_is_read_from_where_it_differs(running: Running) -> None:
    prompt = f"{PROMPT} {PROMPT}"
    first = running.complete(prompt, max_tokens=2)["usage"]
    second = running.complete(f"{prompt} my neighbour", max_tokens=2)["usage"]
    assert second["prompt_tokens_details"]["cached_tokens"] >= first["prompt_tokens"] // 8 * 8
    assert running.metric("cached_tokens_total") > 0
    assert running.metric("cache_bytes") > 0


def test_it_ends_in_order(model: LM, tokenizer: Tokenizer) -> None:
    with serving(model, tokenizer, separated=False) as running:
        text = running.text("the", max_tokens=150, seed=1)
        body = {"model": NAME, "prompt": "the", "max_tokens": 150, "seed": 1, "stream": True}
        with running.client.stream("POST", "/v1/completions", json=body) as response:
            chunks = events(response)
            pieces = [next(chunks)["choices"][0]["text"]]
            running.server.drain()
            assert running.error(503, "/v1/completions", json={"model": NAME})["code"] == "draining"
            running.error(503, "/v1/models", "GET")
            health = running.client.get("/health")
            assert (health.status_code, health.json()) == (503, {"status": "draining"})
            pieces += [chunk["choices"][0]["text"] for chunk in chunks]
        assert "".join(pieces) == text
        wait_until(lambda: running.server.should_exit)


def test_requests_that_do_not_end_are_given_up(model: LM, tokenizer: Tokenizer) -> None:
    with serving(model, tokenizer, separated=False, drain_seconds=0.3) as running, ThreadPoolExecutor() as pool:
        body = {"model": NAME, "prompt": "the", "max_tokens": FOREVER}
        whole = pool.submit(httpx.post, f"{running.url}/v1/completions", json=body, timeout=60)
        stream = pool.submit(httpx.post, f"{running.url}/v1/completions", json={**body, "stream": True}, timeout=60)
        wait_until(lambda: running.metric("growing_texts") == 2)
        running.server.drain()
        assert (whole.result().status_code, whole.result().json()["error"]["code"]) == (503, "draining")
        *_, last = [line for line in stream.result().text.splitlines() if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "draining"


def test_a_failure_is_an_error_of_the_server(
    model: LM, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(model, tokenizer) as running:

        def failing(*_: object, **__: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            patch.setattr(model, "continued", failing)
            error = running.error(500, "/v1/completions", json={"model": NAME, "prompt": PROMPT})
            assert (error["code"], error["type"]) == ("internal_error", "server_error")
            with running.client.stream(
                "POST", "/v1/completions", json={"model": NAME, "prompt": PROMPT, "stream": True}
            ) as response:
                (line,) = [line for line in response.iter_lines() if line]
            assert "internal_error" in line
            running.error(500, "/v1/states", json={"prompt": PROMPT})
        assert "MemoryError" in capsys.readouterr().err
        assert running.text(PROMPT, max_tokens=3)
        assert running.metric("failures_total") == 3
        running.engine.stop()
        wait_until(lambda: not running.service.delivery.is_alive)
        assert running.client.get("/health").status_code == 500


def test_many_connections_at_once(running: Running) -> None:
    """More than the listening queue of a default socket would hold."""
    address = "127.0.0.1", int(running.url.rpartition(":")[2])
    with ExitStack() as stack:
        connections = [stack.enter_context(socket.create_connection(address)) for _ in range(300)]
        for connection in connections:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert all(connection.recv(100).startswith(b"HTTP/1.1 200") for connection in connections)


def read(running: Running, prompt: object, **body: object) -> list[dict[str, Any]]:
    answer = running.post("/v1/read", prompt=prompt, **body)
    chunks: list[dict[str, Any]] = answer["chunks"]
    assert answer["total"] == sum(len(chunk["tokens"]) for chunk in chunks) + chunks[0]["start"]
    return chunks


def test_a_text_is_read_token_by_token(running: Running, model: LM, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(PROMPT)
    chunks = read(running, PROMPT, alternatives=2, weights=True)
    assert [chunk["start"] for chunk in chunks] == list(range(0, len(tokens), 8))
    assert [token for chunk in chunks for token in chunk["tokens"]] == tokens
    assert "".join(text for chunk in chunks for text in chunk["texts"]) == PROMPT
    nats = [value for chunk in chunks for value in chunk["nats"]]
    with torch.no_grad():
        logs = model(torch.tensor([tokens]))[0].log_softmax(dim=-1)
    assert nats[0] is None
    assert nats[1:] == pytest.approx([-float(logs[place - 1, tokens[place]]) for place in range(1, len(tokens))])
    best = [one for chunk in chunks for one in chunk["alternatives"]]
    assert all(len(one) == 2 and one[0][1] >= one[1][1] for one in best[1:])
    # Two tokens to a chunk of this memory: token i reads the blocks of the binary form of i // 2.
    weights = [one for chunk in chunks for one in chunk["weights"][0]]
    assert [len(one) for one in weights] == [(place // 2).bit_count() for place in range(len(tokens))]
    sizes = [chunk["state_bytes"] for chunk in chunks]
    anatomy = running.service.anatomy
    assert sizes == [anatomy.state_bytes(min(start + 8, len(tokens))) for start in range(0, len(tokens), 8)]
    facts = running.client.get("/v1/models").json()["data"][0]["logdepth"]
    assert facts["trees"] == [
        {"kind": "memory", "chunk": 2, "weighted": True, "blocks": [0], "block_bytes": 2 * 6 * (6 + 6) * 8}
    ]
    assert facts["max_length"] == running.service.config.max_length
    with running.client.stream("POST", "/v1/read", json={"prompt": PROMPT, "stream": True}) as response:
        streamed = list(events(response))
    assert [chunk["tokens"] for chunk in streamed] == [chunk["tokens"] for chunk in chunks]
    assert streamed[-1]["seconds"] >= streamed[0]["seconds"] > 0
    assert streamed[0]["weights"] == []


def test_what_is_known_of_a_text_is_not_read_again(running: Running, tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode(PROMPT)
    whole = read(running, tokens)
    (chunk,) = read(running, [*tokens[:19], 5, 6], known=tokens)
    assert chunk["start"] == 16
    (expected,) = [one for one in read(running, [*tokens[:19], 5, 6]) if one["start"] == 16]
    for name in ("tokens", "texts", "alternatives", "weights", "state_bytes"):
        assert chunk[name] == expected[name]
    assert chunk["nats"] == pytest.approx(expected["nats"])
    assert read(running, tokens, known=[9, 9])[0]["start"] == 0
    (nothing,) = read(running, tokens[:16], known=tokens)
    assert (nothing["start"], nothing["tokens"]) == (16, [])
    assert len(whole) == 3
    assert running.error(400, "/v1/read", json={"prompt": ["a"]})["param"] == "prompt"
    assert running.error(400, "/v1/read", json={"prompt": "a", "alternatives": 21})["param"] == "alternatives"
    assert running.error(404, "/v1/read", json={"prompt": "a", "model": "x"})["code"] == "model_not_found"
