"""Servers for tests: a small model behind a real socket, in a thread of this process."""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import httpx

from logdepth.data import Tokenizer
from logdepth.models import LM
from logdepth.serve import Engine
from logdepth.serve.app import guarded_app
from logdepth.serve.config import ServeConfig
from logdepth.serve.metrics import Metrics
from logdepth.serve.server import Server, listening_on
from logdepth.serve.service import Service

NAME = "tiny"
PATIENCE = 60.0


class Running:
    """A server, and a client of it."""

    def __init__(self, service: Service, server: Server, url: str, client: httpx.Client) -> None:
        self.service, self.server, self.url, self.client = service, server, url, client
        self.engine = service.engine

    def post(self, path: str, **body: Any) -> Any:
        """The answer to a request that must succeed."""
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        return response.json()

    def complete(self, prompt: Any, **body: Any) -> Any:
        return self.post("/v1/completions", model=NAME, prompt=prompt, **body)

    def text(self, prompt: Any, **body: Any) -> str:
        (choice,) = self.complete(prompt, **body)["choices"]
        text: str = choice["text"]
        return text

    def error(self, status: int, path: str, method: str = "POST", **sent: Any) -> dict[str, Any]:
        """The error with which a request is refused."""
        response = self.client.request(method, path, **sent)
        assert response.status_code == status, response.text
        assert response.headers["content-type"] == "application/json"
        body = response.json()
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
        error: dict[str, Any] = body["error"]
        assert error["message"]
        assert "\n" not in error["message"]
        return error

    def streamed(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """The chunks of a streamed answer."""
        with self.client.stream("POST", path, json={"model": NAME, "stream": True, **body}) as response:
            assert response.status_code == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return list(events(response))

    def metric(self, name: str) -> float:
        lines = self.client.get("/metrics").text.splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith((f"logdepth_{name} ", f"logdepth_{name}{{"))
        )


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Server-sent events, which must end properly unless they are left."""
    done = False
    for line in response.iter_lines():
        assert not done or not line
        if line == "data: [DONE]":
            done = True
        elif line:
            assert line.startswith("data: ")
            yield json.loads(line.removeprefix("data: "))
    assert done


@contextmanager
def serving(
    model: LM, tokenizer: Tokenizer, *, keys: Sequence[str] = (), separated: bool = True, **limits: Any
) -> Iterator[Running]:
    """A server on a free port, which ends with the scope."""
    config = ServeConfig(**{"stretch": 8, "drain_seconds": 20.0, **limits})
    service = Service(NAME, Engine(model, tokenizer, config, separated=separated), config, Metrics())
    with listening_on("127.0.0.1", 0) as listening:
        server = Server(guarded_app(service, keys), lambda _: None)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve_on(listening)), daemon=True)
        thread.start()
        wait_until(lambda: server.started)
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
        try:
            with httpx.Client(base_url=url, headers=headers, timeout=PATIENCE) as client:
                yield Running(service, server, url, client)
        finally:
            if not server.should_exit:
                server.drain()
            thread.join(PATIENCE)
            assert not thread.is_alive()


def wait_until(holds: Callable[[], object], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.01)
