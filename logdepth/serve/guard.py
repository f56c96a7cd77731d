"""What every request passes before it is answered: API keys, draining, and limits on its body; and what is counted.

A client that goes away ends the work on its request, whatever it is waiting for.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Sequence
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from logdepth.serve.config import ServeConfig
from logdepth.serve.metrics import Metrics
from logdepth.serve.responses import EVENT_STREAM, ApiError, as_event

ENDING = ApiError(503, "the server is about to end; try another", code="draining")
OPEN_ROUTES = {"/", "/health"}
"""What needs no API key."""
ROUTES = {"/", "/health", "/metrics", "/openapi.json"}
LINGER_BYTES = 256 * 2**20
"""How much of a body that is refused is read to its end: a client that is still sending does not read the answer."""


class ApiKeys:
    """The keys that open a server; none: it is open to all."""

    def __init__(self, keys: Sequence[str]) -> None:
        # Digests have one length, so that a comparison takes as long whatever is compared.
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def owner(self, authorization: bytes | None) -> int | None:
        """The number of the key in a header; None where no key is needed. Raises an ApiError for a wrong one."""
        if not self._digests:
            return None
        scheme, _, key = (authorization or b"").partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        found = [hmac.compare_digest(digest, one) for one in self._digests]
        if scheme.lower() != b"bearer" or not any(found):
            raise ApiError(
                401,
                "give an API key of this server in the header Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return found.index(True)


class Guard:
    """ASGI middleware around the application."""

    def __init__(self, app: ASGIApp, config: ServeConfig, keys: ApiKeys, metrics: Metrics) -> None:
        self.app, self.config, self.keys, self.metrics = app, config, keys, metrics
        self.draining = False
        """Whether new requests are refused, because the server is about to end."""
        self._given_up = asyncio.Event()

    def give_up(self) -> None:
        """End all requests that are being answered with an error. To be called in the event loop."""
        self._given_up.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        path = scope["path"]
        begun: Message | None = None

        async def counting(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = message
                self.metrics.requests[_route(path), message["status"]] += 1
            await send(message)

        async def refuse(error: ApiError) -> None:
            """Answer with an error, or end a stream with one."""
            if begun is None:
                await error.response()(scope, receive, counting)
            elif (b"content-type", EVENT_STREAM) in begun["headers"]:
                await send({"type": "http.response.body", "body": as_event(error.body()), "more_body": False})

        try:
            headers = dict(scope["headers"])
            if path not in OPEN_ROUTES:
                scope.setdefault("state", {})["owner"] = self.keys.owner(headers.get(b"authorization"))
            if self.draining and path.startswith("/v1/"):
                raise ENDING
            body = await self._body(headers, receive)
        except ApiError as error:
            await refuse(error)
            return
        except ConnectionResetError:
            return
        self.metrics.running += 1
        try:
            if not await self._answered(scope, body, receive, counting):
                await refuse(ENDING)
        finally:
            self.metrics.running -= 1

    async def _body(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """The whole body of a request."""
        limit, seconds = self.config.max_body_bytes, self.config.body_seconds
        announced = headers.get(b"content-length", b"0")
        size = int(announced) if announced.isdigit() and int(announced) > LINGER_BYTES else 0
        parts: list[bytes] = []
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while size <= LINGER_BYTES:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise ConnectionResetError
                    size += len(message.get("body", b""))
                    if size <= limit:
                        parts.append(message.get("body", b""))
                        if not message.get("more_body", False):
                            return b"".join(parts)
                    elif not message.get("more_body", False):
                        break
        if size > limit:
            raise ApiError(413, f"the body must not exceed {limit:,} bytes", code="body_too_large")
        raise ApiError(408, f"the body did not arrive within {seconds:g} s", code="body_timeout")

    async def _answered(self, scope: Scope, body: bytes, receive: Receive, send: Send) -> bool:
        """Run the application until it has answered, or its client has gone away.

        Returns:
            False if the answer was given up before.
        """
        gone = asyncio.Event()
        body_is_read = False

        async def replayed() -> Message:
            nonlocal body_is_read
            if not body_is_read:
                body_is_read = True
                return {"type": "http.request", "body": body, "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        answer = asyncio.ensure_future(self.app(scope, replayed, send))
        watching, ending = asyncio.ensure_future(watch()), asyncio.ensure_future(self._given_up.wait())
        try:
            await asyncio.wait({answer, watching, ending}, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                answer.result()
            elif watching.done():
                self.metrics.disconnects += 1
            return answer.done() or watching.done()
        finally:
            gone.set()
            for task in (answer, watching, ending):
                task.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await task


def _route(path: str) -> str:
    """The path without what differs between requests, so that few are counted."""
    if path in ROUTES:
        return path
    parts = path.split("/")
    if len(parts) > 2 and parts[1] == "v1" and parts[2] in ("completions", "chat", "models", "states", "read"):
        fork = "/fork" if parts[2] == "states" and parts[-1] == "fork" else ""
        return f"/v1/{parts[2]}{fork}"
    return "other"
