"""The server: a socket, uvicorn on it, and an orderly end."""

import asyncio
import errno
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn

from logdepth.errors import UserError
from logdepth.serve.guard import Guard

BACKLOG = 4096


class Server(uvicorn.Server):
    """uvicorn, which refuses new requests after the first signal and ends when the others are answered."""

    def __init__(self, guard: Guard, on_message: Callable[[str], None]) -> None:
        config = uvicorn.Config(
            guard,
            http="httptools",
            ws="none",
            lifespan="on",
            log_level="error",
            access_log=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_graceful_shutdown=5,
        )
        super().__init__(config)
        self.guard, self.on_message = guard, on_message

    async def serve_on(self, listening: socket.socket) -> None:
        """Serve until a signal comes."""
        self._loop = asyncio.get_running_loop()
        await self.serve(sockets=[listening])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """On the first signal, drain; on a second one, end at once. uvicorn would repeat the signal at the end."""
        del frame
        if self.guard.draining:
            self._deadline = 0.0
        else:
            self.on_message(f"{signal.Signals(sig).name}: new requests are refused; the others are answered first")
            self.drain()

    def drain(self) -> None:
        """Refuse new requests, and end when the others are answered. May be called from any thread."""
        self.guard.draining = True
        self._deadline = time.monotonic() + self.guard.config.drain_seconds
        self._loop.call_soon_threadsafe(lambda: setattr(self, "_ending", asyncio.ensure_future(self._end())))

    async def _end(self) -> None:
        while self.guard.metrics.running and time.monotonic() < self._deadline:
            await asyncio.sleep(0.05)
        if self.guard.metrics.running:
            self.on_message(f"requests that have not ended in time are given up: {self.guard.metrics.running}")
            self.guard.give_up()
        self.should_exit = True


def listening_on(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 is any that is free."""
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        found = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UserError(f"--host {host} is not an address of this machine: {error.strerror}") from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(BACKLOG)
    except OSError as error:
        found.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(f"port {port} of {host} is in use; choose another with --port, or 0 for any") from None
        if error.errno == errno.EACCES:
            raise UserError(f"port {port} needs more rights; choose one from 1024 on with --port") from None
        raise UserError(f"cannot listen on {host}, port {port}: {error.strerror}; check --host and --port") from None
    return found
