"""Responses: JSON, events as they are made, and errors as OpenAI's API has them."""

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
}
"""The type of an error by its status; others are `invalid_request_error`."""

EVENT_STREAM = b"text/event-stream; charset=utf-8"
Write = Callable[[bytes], Awaitable[None]]


class ApiError(Exception):
    """A request that is not answered, and what its client is told."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """
        Args:
            status: of the response.
            message: what is wrong, and what to do.
            param: the field of the request that is wrong.
            code: a word for programs.
            headers: of the response.
        """
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        return json_response(self.body(), self.status, self.headers)


def json_response(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(as_json(value), status, dict(headers or {}), media_type="application/json")


def as_json(value: Any) -> bytes:
    """JSON in UTF-8, also of text that a client has sent and that has no encoding."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode("utf-8", errors="replace")


def as_event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + as_json(value) + b"\n\n"


class EventStream(Response):
    """Server-sent events, written as they are made."""

    def __init__(self, make: Callable[[Write], Awaitable[None]], on_end: Callable[[], None]) -> None:
        """
        Args:
            make: makes all events, and is given the function that writes them.
            on_end: called at the end, however it comes.
        """
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(None, 200, headers, media_type="text/event-stream")
        del self.headers["content-length"]
        self._make, self._on_end = make, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope, receive

        async def write(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._make(write)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._on_end()
