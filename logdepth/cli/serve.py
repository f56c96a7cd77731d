"""`logdepth serve`: serve a run to OpenAI's clients, and a playground to browsers."""

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from logdepth.acceleration import acceleration_in_words
from logdepth.cli.parsing import parse
from logdepth.data import CORPORA
from logdepth.errors import UserError
from logdepth.models import LM
from logdepth.ops.precision import Precision
from logdepth.runs import PRETRAINED, RunFolder, Weights, device_named
from logdepth.serve import Engine
from logdepth.serve.config import ServeConfig

KEYS_VARIABLE = "LOGDEPTH_API_KEYS"


@dataclass(frozen=True, kw_only=True)
class ServeCommand:
    """Serve a run over HTTP: OpenAI's API for its clients, and a playground for browsers. SIGTERM ends it in order.

    Without API keys, anyone who reaches the port may use it.
    """

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="[RUN]")] = PRETRAINED
    """Folder of the run; by default the small model that comes with the library."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 is all addresses of this machine."""
    port: int = 8000
    """Port to listen on; 0 is any that is free."""
    name: str | None = None
    """Name of the model for clients; by default the name of the run's folder."""
    api_keys: Path | None = None
    """File with one API key per line; by default the keys in $LOGDEPTH_API_KEYS, separated by commas. Without any, no
    key is needed."""
    limits: Annotated[ServeConfig, tyro.conf.arg(name="")] = field(default_factory=ServeConfig)
    """What clients may do."""
    weights: Weights = "best"
    """Weights to load: those with the lowest validation loss (best) or those of the latest checkpoint (last)."""
    device: str = "auto"
    """Device, such as cpu or cuda:0; auto selects a GPU if one is available."""
    precision: Precision = "auto"
    """Precision of the arithmetic; auto is bfloat16 on CUDA and float32 elsewhere."""
    accelerate: bool = True
    """Use kernels and CUDA graphs on a GPU."""


def run(arguments: Sequence[str]) -> int:
    command = parse(ServeCommand, arguments, "serve")
    try:
        from logdepth.serve.app import guarded_app
        from logdepth.serve.metrics import Metrics
        from logdepth.serve.server import Server, listening_on
        from logdepth.serve.service import Service
    except ImportError as error:
        raise UserError(f"serving needs {error.name}; install it with: pip install '.[serve]'") from None
    if not 0 <= command.port < 2**16:
        raise UserError(f"--port must be from 0 to 65535; got {command.port}")
    keys = _api_keys(command.api_keys)
    listening = listening_on(command.host, command.port)  # before the model is loaded, which takes longer
    with listening:
        loaded = RunFolder(command.run).load(command.weights, device_named(command.device, "--device"))
        if not isinstance(loaded.model, LM):
            raise UserError(f"{command.run} holds a {type(loaded.model).__name__}, and only an LM can be served")
        if next(loaded.model.parameters()).is_cuda:
            print(acceleration_in_words(loaded.model, command.accelerate), file=sys.stderr)
        engine = Engine(
            loaded.model,
            loaded.tokenizer,
            command.limits,
            separated=CORPORA[loaded.config.data.corpus].separated,
            precision=command.precision,
            accelerate=command.accelerate,
            on_warning=_say,
        )
        name = command.name or command.run.resolve().name
        service = Service(name, engine, command.limits, Metrics())
        host, port = listening.getsockname()[:2]
        address = f"[{host}]" if ":" in host else host
        print(f"http://{address}:{port} serves {name}" + (" to those with a key" if keys else ""), flush=True)
        asyncio.run(Server(guarded_app(service, keys), _say).serve_on(listening))
    return 0


def _api_keys(file: Path | None) -> list[str]:
    if file is None:
        given = os.environ.get(KEYS_VARIABLE, "").split(",")
        keys = [key.strip() for key in given if key.strip()]
    else:
        try:
            keys = [line.strip() for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
        except UnicodeDecodeError:
            raise UserError(f"--api-keys {file} is not text in UTF-8") from None
        if not keys:
            raise UserError(f"--api-keys {file} holds no key; write one key per line")
    for key in keys:
        if not (key.isascii() and key.isprintable()) or " " in key:
            raise UserError("an API key must be printable ASCII without spaces; one of the given keys is not")
    return keys


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
