"""What a child of the worker can do apart from `main`; each function prints like a verb and returns an exit code."""

import asyncio
import contextlib
import io
import json
import os
import signal
import socket
import sys
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

import logdepth.drawing as drawing
import logdepth.reproduce.study as study
from logdepth.cli import main
from logdepth.data import CORPORA, open_prepared
from logdepth.errors import UserError
from logdepth.solving import SolverTrainer
from logdepth.trained import load
from logdepth.training import Trainer
from tests.tiny_study import CONTEXTS, TIME_TOKENS


class EnoughError(BaseException):
    """Training got as far as it was to get."""


def prepare_process() -> None:
    """Settings that every child inherits: one thread, studies of short contexts, and empty PNGs, which cost most."""
    torch.set_num_threads(1)
    original = drawing._drawn

    def drawn(figure: Any, suffix: str, **settings: Any) -> bytes:
        return b"" if suffix == "png" else original(figure, suffix, **settings)

    drawing._drawn = drawn
    study.PAPER_CONTEXTS = CONTEXTS
    study.TIME_TOKENS = TIME_TOKENS


def stop_at(step: int, *arguments: str) -> int:
    """Run a verb whose training gets SIGTERM after a step."""
    _after_step(step, lambda: os.kill(os.getpid(), signal.SIGTERM))
    sys.argv = ["logdepth", *arguments]
    return main()


def steps_at_most(step: int, *arguments: str) -> int:
    """Run a verb; end it well when its training has done so many steps."""

    def enough() -> None:
        raise EnoughError

    _after_step(step, enough)
    sys.argv = ["logdepth", *arguments]
    try:
        return main()
    except EnoughError:
        return 0


def load_run(run: str) -> int:
    """`logdepth.load` from Python, and what the model says."""
    try:
        model = load(Path(run), device="cpu")
        found = model.evaluate("the cat sees a small dog .\n" * 8)
        text = model.generate("the old clock", max_tokens=12, temperature=0.0)
    except UserError as error:
        print(f"logdepth load: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"step": model.step, "text": text, "evaluation": found.as_dict(False)}))
    return 0


def serve_run(run: str) -> int:
    """`logdepth serve`, whose process gets SIGTERM when it has answered one request."""
    from logdepth.serve.server import Server

    original, said = Server.serve_on, []

    def ask(address: tuple[str, int]) -> None:
        body = {"model": run, "prompt": "the old clock", "max_tokens": 12, "temperature": 0}
        request = urllib.request.Request(
            f"http://{address[0]}:{address[1]}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=15) as answer:
            said.append(json.load(answer)["choices"])
        os.kill(os.getpid(), signal.SIGTERM)

    async def serve_once(self: Server, listening: socket.socket) -> None:
        asking = asyncio.create_task(asyncio.to_thread(ask, listening.getsockname()))
        await original(self, listening)
        await asking

    Server.serve_on = serve_once  # type: ignore[method-assign]
    # The address differs each time.
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        code = main(["serve", run, "--port", "0", "--device", "cpu"])
    sys.stderr.write("".join(line for line in errors.getvalue().splitlines(True) if not line.startswith("SIGTERM")))
    if not code:
        print(json.dumps(said))
    return code


def look_at_stores(key: str, paths: list[str], text: str | None, lossless: bool) -> int:
    """Compare stores with the text of their corpus; exit with 1 and one line if they differ.

    Args:
        key: the key of the stores.
        paths: those of the corpus; flags may follow.
        text: all text of the corpus in any order of its files, if it is known.
        lossless: whether the tokens must give the text.
    """
    prepared = open_prepared(key)
    corpus = CORPORA["text"](None, [Path(path) for path in paths if not path.startswith("--")])
    read = list(corpus.passages())
    for split, store in prepared.stores.items():
        passages = [passage.text for passage in read if passage.split == split]
        info, ids, whole = store.info, store.tokens.tolist(), "".join(passages)
        words = sum(len(text.split()) for text in passages)
        counts = (len(whole.encode()), words, whole.count("\n"), len(ids))
        if counts != (info.bytes, info.words, info.line_ends, info.tokens):
            print(f"{split}: counts are {counts}, its file says {info}")
            return 1
        if ids and not 0 <= min(ids) <= max(ids) < prepared.tokenizer.vocab_size:
            print(f"{split}: tokens from {min(ids)} to {max(ids)}")
            return 1
        decoded = "".join(map(prepared.tokenizer.decode, _documents(ids, info.separator)))
        if lossless and decoded != whole.replace("\u2581", " "):
            print(f"{split}: decoded to {decoded[:80]!r} instead of {whole[:80]!r}")
            return 1
    characters = Counter("".join(passage.text for passage in read).replace("\ufeff", ""))
    if text is not None and characters != Counter(text.replace("\ufeff", "")):
        print(f"the corpus has {characters.total()} characters instead of {len(text)}")
        return 1
    return 0


def _documents(ids: list[int], separator: int | None) -> Iterator[list[int]]:
    start = 0
    for end, token in enumerate(ids):
        if token == separator:
            yield ids[start:end]
            start = end + 1
    yield ids[start:]


def _after_step(step: int, act: Callable[[], None]) -> None:
    original = Trainer._step

    def counted(self: Trainer) -> None:
        original(self)
        if self.state.step >= step:
            act()

    def counted_on_tasks(self: SolverTrainer) -> None:
        original_on_tasks(self)
        if self.state.step >= step:
            act()

    original_on_tasks = SolverTrainer._step
    Trainer._step = counted  # type: ignore[method-assign]
    SolverTrainer._step = counted_on_tasks  # type: ignore[method-assign]
