"""`logdepth serve` as a process: it starts, says where, serves, and ends in order with code 0."""

import builtins
import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from logdepth.cli.serve import _api_keys
from logdepth.errors import UserError
from logdepth.trained import load
from logdepth.training import train
from tests.command_line import refused
from tests.run_folders import run_config
from tests.small_models import HYBRID


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("serve") / "my-run"
    train(run_config(corpus, HYBRID, max_steps=8), folder)
    return folder


@contextmanager
def process(run: Path, *flags: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """The process, its address and the line that it has said."""
    command = [sys.executable, "-m", "logdepth", "serve", str(run), "--port", "0", "--device", "cpu", *flags]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    ) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            yield server, line.split()[0] if line else "", line
        finally:
            server.kill()


def asked(url: str, body: dict[str, Any] | None = None, key: str = "") -> Any:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    return urllib.request.urlopen(urllib.request.Request(url, data, headers), timeout=60)


def test_it_serves_and_ends_in_order(run: Path) -> None:
    with process(run, "--drain-seconds", "600") as (server, url, line):
        assert line == f"{url} serves my-run\n", server.stderr.read()
        body = {"model": "my-run", "prompt": "the cat", "max_tokens": 12, "seed": 4}
        with asked(f"{url}/v1/completions", body) as answer:
            text = json.load(answer)["choices"][0]["text"]
        expected = load(run, device="cpu").generate("the cat", max_tokens=12, seed=4)
        assert text == expected
        long = {**body, "max_tokens": 250, "stream": True, "temperature": 2.0, "stop": ["\ufffe"]}
        with asked(f"{url}/v1/completions", long) as answer:
            first = answer.readline()
            server.send_signal(signal.SIGTERM)
            lines = [first, *answer]
        assert lines[-2] == b"data: [DONE]\n"
        assert server.wait(60) == 0
        assert server.stderr.read() == "SIGTERM: new requests are refused; the others are answered first\n"
        assert server.stdout.read() == ""


def test_names_and_keys(run: Path) -> None:
    with process(run, "--name", "cat", LOGDEPTH_API_KEYS="a1, b2") as (server, url, line):
        assert line == f"{url} serves cat to those with a key\n"
        with pytest.raises(urllib.error.HTTPError, match="401"):
            asked(f"{url}/v1/models", key="c3")
        with asked(f"{url}/v1/models", key="b2") as answer:
            assert json.load(answer)["data"][0]["id"] == "cat"
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 0


def test_mistakes_are_one_line(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        line = refused(capsys, "serve", str(run), "--port", port)
        assert line == f"logdepth serve: port {port} of 127.0.0.1 is in use; choose another with --port, or 0 for any"
    assert "holds no run" in refused(capsys, "serve", str(tmp_path), "--port", "0")
    assert "--port must be from 0 to 65535; got 70000" in refused(capsys, "serve", str(run), "--port", "70000")
    assert "--host no.such.host.invalid is not an address" in refused(
        capsys, "serve", str(run), "--host", "no.such.host.invalid"
    )
    assert "max_length must be at least 1" in refused(capsys, "serve", str(run), "--max-length", "0")
    assert "request_seconds must be above 0" in refused(capsys, "serve", str(run), "--request-seconds", "0")
    assert "cannot use" in refused(capsys, "serve", str(run), "--api-keys", str(tmp_path / "none"))


def test_missing_packages_are_named(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def without_fastapi(name: str, *rest: Any) -> Any:
        if name == "fastapi":
            raise ImportError(name="fastapi")
        return original(name, *rest)

    for name in [name for name in sys.modules if name.startswith("logdepth.serve.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without_fastapi)
    line = refused(capsys, "serve", str(run))
    assert line == "logdepth serve: serving needs fastapi; install it with: pip install '.[serve]'"


def test_keys_come_from_a_file_or_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOGDEPTH_API_KEYS", raising=False)
    assert _api_keys(None) == []
    monkeypatch.setenv("LOGDEPTH_API_KEYS", " one,two ,,")
    assert _api_keys(None) == ["one", "two"]
    file = tmp_path / "keys"
    file.write_text("three\n\nfour \n")
    assert _api_keys(file) == ["three", "four"]
    file.write_text("\n")
    with pytest.raises(UserError, match="holds no key"):
        _api_keys(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match="is not text in UTF-8"):
        _api_keys(file)
    file.write_text("with space")
    with pytest.raises(UserError, match="printable ASCII without spaces"):
        _api_keys(file)
