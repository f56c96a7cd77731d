"""Odd requests to a server of a small model, several at a time, among good ones whose texts are known.

    python -m tests.hostile.requests --count 3000 --seed 1
    python -m tests.hostile.requests --only 137

A good request must get the texts that the model makes alone, whoever else is there. A bad one must be refused with an
error in OpenAI's shape. Some clients go away before they are answered.
"""

import contextlib
import copy
import http.client
import json
import random
import socket
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from logdepth.data import Tokenizer, prepare
from logdepth.decoding import SamplingConfig
from logdepth.decoding.continuation import Continuation
from logdepth.models import LM
from tests.hostile.commands import FLOATS, INTEGERS, TEXTS
from tests.hostile.outcomes import (
    DONE,
    HANG,
    MESSY,
    REFUSED,
    SILENT,
    TRACEBACK,
    Case,
    numbers_of,
    parser,
    run_cases,
    worst,
)
from tests.hostile.worker import HANG_SECONDS
from tests.serving import NAME, Running, serving
from tests.small_models import small_model
from tests.tiny_corpus import tiny_data, write_corpus

PROMPT = "the cat sees a small dog in the garden . every bird follows the old clock under a tree ."
PATHS = ("/v1/completions", "/v1/chat/completions", "/v1/states", "/v1/read", "/v1/models", "/v1/states/x/fork")
ODD_PATHS = (
    "/",
    "/health",
    "/metrics",
    "/openapi.json",
    "/v1",
    "/v1/states/%00",
    "/v1/models/%ff",
    "/..",
    "//",
    "/v1/x",
)
REFUSALS = (400, 404, 405, 408, 413, 429)
ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 2**31, 2**63, -(2**63), 10**40, 0.5, -0.0, 1e308, 5e-324, float("nan"),
    float("inf"),
    "", "x", "\ud800", "\0", "a" * 3000, [], [[]], [1], [-1], [10**9], [[1], []], ["a"], ["a", 1], [None], {}, {"a": 1},
    [0.5], [[1, 2], [3]], [True], {"role": "user"}, [{"role": "user", "content": "x"}], *TEXTS[:8],
)  # fmt: skip


class Request(NamedTuple):
    """A request as bytes, and what is known of its answer."""

    raw: bytes
    texts: list[str] | None = None
    """Of a good request: its texts."""
    leaves: float | None = None
    """Seconds after which its client goes away."""


class Answer(NamedTuple):
    status: int
    kind: str
    body: bytes


class Requests:
    """A server, and requests to it."""

    def __init__(self, running: Running, model: LM, tokenizer: Tokenizer, seed: int) -> None:
        self.running, self.model, self.tokenizer, self.seed = running, model, tokenizer, seed
        self.tokens = tokenizer.encode(PROMPT)

    def one(self, number: int) -> Case:
        """Up to six requests at once."""
        chance = random.Random(f"{self.seed} {number}")
        requests = [self.drawn(chance) for _ in range(chance.choice((1, 1, 2, 3, 6)))]
        with ThreadPoolExecutor(len(requests)) as pool:
            cases = list(pool.map(self.judged, requests))
        if not self.running.service.delivery.is_alive:
            return Case(f"{requests[0].raw[:300]!r}", TRACEBACK, "the engine has ended")
        return worst(cases)

    def drawn(self, chance: random.Random) -> Request:
        kind = chance.random()
        leaves = chance.choice((0.0, 0.001, 0.01, 0.1)) if chance.random() < 0.1 else None
        if kind < 0.25:
            body = self.good(chance)
            return Request(as_http("/v1/completions", json.dumps(body).encode()), self.expected(body), leaves)
        path = chance.choice(PATHS)
        body: Any = self.plausible(chance, path)
        if kind < 0.75:
            for _ in range(chance.choice((1, 1, 2, 3))):
                mutate(chance, body)
            return Request(as_http(path, json.dumps(body).encode()), None, leaves)
        data = json.dumps(body).encode()
        if chance.random() < 0.6:
            data = damaged(chance, data)
        method = chance.choice(("POST", "POST", "GET", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "X"))
        headers = chance.choice(
            ({}, {"Content-Type": "text/plain"}, {"Content-Type": "multipart/form-data"}, {"Content-Encoding": "gzip"},
             {"Authorization": "Bearer \xff"}, {"Expect": "100-continue"},
             {"Content-Type": "application/json; charset=utf-16"})
        )  # fmt: skip
        return Request(as_http(chance.choice((path, *ODD_PATHS)), data, method, headers), None, leaves)

    def good(self, chance: random.Random) -> dict[str, Any]:
        """A request whose texts can be known."""
        start = chance.choice((0, 0, 5))
        prompt = self.tokens[start : start + chance.randrange(1, len(self.tokens) - 6)]
        body = {
            "model": NAME,
            "prompt": prompt if chance.random() < 0.5 else [prompt, self.tokens[:3]],
            "max_tokens": chance.randrange(1, 16),
            "seed": chance.randrange(100),
            "n": chance.choice((1, 1, 2)),
            "temperature": chance.choice((0, 0.7, 1.5)),
            "stop": chance.choice((None, "e", ["dog", " t"])),
            "stream": chance.random() < 0.5,
        }
        return body | ({"logprobs": 2} if chance.random() < 0.3 else {})

    def plausible(self, chance: random.Random, path: str) -> dict[str, Any]:
        body = self.good(chance)
        if path == "/v1/chat/completions":
            del body["prompt"]
            body["messages"] = [{"role": "user", "content": "the cat"}]
            return {name: value for name, value in body.items() if name != "logprobs"}
        if path == "/v1/completions":
            return body
        return {"prompt": PROMPT[: chance.randrange(60)]} | ({"tokens": 2} if "fork" in path else {})

    @torch.inference_mode()
    def expected(self, body: dict[str, Any]) -> list[str]:
        """The texts that the model makes alone."""
        stop = body["stop"]
        config = SamplingConfig(
            max_tokens=body["max_tokens"],
            temperature=float(body["temperature"]),
            seed=body["seed"],
            stop=() if stop is None else (stop,) if isinstance(stop, str) else tuple(stop),
        )
        several = isinstance(body["prompt"][0], list)
        found = []
        for prompt in body["prompt"] if several else [body["prompt"]]:
            for number in range(body["n"]):
                text, pieces = Continuation(self.tokenizer, prompt, config, number), ""
                logits, state = self.model.step(torch.tensor([prompt]), self.model.init_state(1))
                while text.ended is None:
                    token = text.choose(logits[0, -1].double().numpy())
                    pieces += text.add(token)
                    logits, state = self.model.step(torch.tensor([[token]]), state)
                found.append(pieces)
        return found

    def judged(self, request: Request) -> Case:
        what = f"{request.raw[:400]!r}"
        try:
            answer = self.exchanged(request)
        except TimeoutError:
            return Case(what, HANG, f"no answer after {HANG_SECONDS:g} s")
        if answer is None or (not answer.status and request.leaves is not None):
            return Case(what, DONE, "the client went away")
        shown = f"{answer.status} {answer.body[:300]!r}"
        if answer.status >= 500 or not answer.status:
            return Case(what, TRACEBACK, shown)
        if request.texts is not None:
            found = texts_of(answer)
            return Case(what, DONE if found == request.texts else SILENT, f"{shown}; expected {request.texts}")
        if answer.status == 200:
            return Case(what, DONE, shown[:80])
        is_error = answer.kind == "application/json" and self.is_error(answer.body)
        head = request.raw.startswith(b"HEAD ") and not answer.body
        # uvicorn refuses what is no HTTP, before anybody else sees it.
        no_http = answer.status == 400 and answer.body == b"Invalid HTTP request received."
        return Case(what, REFUSED if (is_error or head or no_http) and answer.status in REFUSALS else MESSY, shown)

    def is_error(self, body: bytes) -> bool:
        try:
            error = json.loads(body)["error"]
        except (ValueError, KeyError, TypeError):
            return False
        return error.keys() == {"message", "type", "param", "code"} and "\n" not in error["message"]

    def exchanged(self, request: Request) -> Answer | None:
        address = "127.0.0.1", int(self.running.url.rpartition(":")[2])
        with socket.create_connection(address, timeout=HANG_SECONDS) as connection:
            connection.sendall(request.raw)
            if request.leaves is not None:
                connection.settimeout(request.leaves or None)
                if not request.leaves:
                    return None
            response = http.client.HTTPResponse(connection, method=request.raw.split(b" ")[0].decode("latin-1"))
            try:
                response.begin()
                return Answer(response.status, response.getheader("content-type", ""), response.read())
            except TimeoutError:
                if request.leaves is None:
                    raise
                return None
            except (http.client.HTTPException, ConnectionError) as error:
                return Answer(0, "", repr(error).encode())


def texts_of(answer: Answer) -> list[str] | None:
    """The texts of a completion, streamed or not."""
    if answer.status != 200:
        return None
    if answer.kind.startswith("application/json"):
        return [choice["text"] for choice in json.loads(answer.body)["choices"]]
    found: dict[int, str] = {}
    for line in answer.body.decode().splitlines():
        if line and line != "data: [DONE]":
            for choice in json.loads(line.removeprefix("data: ")).get("choices", []):
                found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return [found[index] for index in sorted(found)]


def as_http(path: str, data: bytes, method: str = "POST", headers: dict[str, str] | None = None) -> bytes:
    given = {"Host": "x", "Connection": "close", "Content-Type": "application/json", "Content-Length": str(len(data))}
    lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in (given | (headers or {})).items())]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + data


def mutate(chance: random.Random, body: Any) -> None:
    """Change, remove or add one field, at any depth."""
    if isinstance(body, list) and body and chance.random() < 0.8:
        place: Any = chance.randrange(len(body))
    elif isinstance(body, dict) and body and chance.random() < 0.9:
        place = chance.choice(list(body))
    elif isinstance(body, dict):
        body[chance.choice(("n", "echo", "best_of", "suffix", "state", "top_p", "logprobs", "known", "colour", ""))] = (
            odd(chance)
        )
        return
    else:
        return
    if isinstance(body[place], dict | list) and body[place] and chance.random() < 0.5:
        mutate(chance, body[place])
    elif isinstance(body, dict) and chance.random() < 0.15:
        del body[place]
    else:
        numbers = chance.choice((INTEGERS, FLOATS))
        body[place] = odd(chance) if chance.random() < 0.85 else chance.choice(numbers)


def odd(chance: random.Random) -> Any:
    """Draw an odd value, as a copy, because later mutations change what is inside of it."""
    return copy.deepcopy(chance.choice(ODD))


def damaged(chance: random.Random, data: bytes) -> bytes:
    place = chance.randrange(len(data) + 1)
    noise = np.random.default_rng(chance.randrange(2**32)).bytes(chance.choice((1, 4, 200)))
    return chance.choice(
        (data[:place], data[:place] + noise + data[place:], noise, b"", b"[" * 50_000, data + data,
         b"\xef\xbb\xbf" + data, data.decode().encode("utf-16"), b'{"model": "' + b"x" * 40_000 + b'"}',
         data.replace(b'"', b"'"))
    )  # fmt: skip


@contextlib.contextmanager
def requests_in(folder: Path | None, seed: int) -> Iterator[Requests]:
    with contextlib.ExitStack() as stack:
        base = folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="logdepth-hostile-")))
        tokenizer = prepare(tiny_data(write_corpus(base / "corpus"))).tokenizer
        model = small_model("memory-window", tokenizer.vocab_size)
        assert isinstance(model, LM)
        limits = {"max_length": 400, "max_concurrent": 64, "max_texts": 5, "max_body_bytes": 30_000, "max_states": 40}
        running = stack.enter_context(serving(model, tokenizer, request_seconds=15.0, **limits))
        yield Requests(running, model, tokenizer, seed)


def main() -> int:
    arguments = parser(__doc__, count=3000).parse_args()
    torch.set_num_threads(1)
    with requests_in(arguments.keep, arguments.seed) as requests:
        return run_cases("requests", numbers_of(arguments), requests.one, arguments)


if __name__ == "__main__":
    sys.exit(main())
