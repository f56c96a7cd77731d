"""The application: routes, and errors in OpenAI's shape whatever goes wrong."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from logdepth.serve.guard import ApiKeys, Guard
from logdepth.serve.responses import ApiError
from logdepth.serve.service import Service
from logdepth.version import __version__

MESSAGES = {"extra_forbidden": "this field is unknown; leave it out", "missing": "this field is missing"}
"""Messages for kinds of errors that are clearer than pydantic's."""


EITHER = {
    "prompt": "must be a text or a list of tokens, or several of either; none may be empty but a text",
    "stop": "must be a text or at most 16 texts, none of them empty",
    "content": "must be a text, or parts of type text",
}
"""Messages for fields that may have one of several types."""


def guarded_app(service: Service, keys: Sequence[str] = ()) -> Guard:
    """The ASGI application of a service, which opens to these API keys, or to all."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.delivery.begin()
        yield
        service.delivery.end()

    # The pages of documentation would load scripts from elsewhere.
    app = FastAPI(title="logdepth serve", version=__version__, docs_url=None, redoc_url=None, lifespan=lifespan)
    app.get("/", include_in_schema=False)(service.playground)
    app.get("/health")(service.health)
    app.get("/metrics")(service.metrics_page)
    app.get("/v1/models")(service.models)
    app.get("/v1/models/{name:path}")(service.model)
    app.post("/v1/completions")(service.completions)
    app.post("/v1/chat/completions")(service.chat)
    app.post("/v1/read")(service.read)
    app.post("/v1/states")(service.save_state)
    app.get("/v1/states")(service.list_states)
    app.get("/v1/states/{name}")(service.state)
    app.delete("/v1/states/{name}")(service.delete_state)
    app.post("/v1/states/{name}/fork")(service.fork_state)
    app.exception_handler(ApiError)(_api_error)
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(Exception)(_defect)
    guard = Guard(app, service.config, ApiKeys(keys), service.metrics)
    service.is_draining = lambda: guard.draining
    return guard


async def _api_error(_: Request, error: ApiError) -> Response:
    return error.response()


async def _invalid(_: Request, error: RequestValidationError) -> Response:
    """The first thing that is wrong with a request."""
    found = error.errors()
    if found[0]["type"] == "json_invalid":
        detail = found[0].get("ctx", {}).get("error", "")
        return ApiError(400, f"the body is not JSON: {detail}", code="invalid_json").response()
    wrong = found[0]
    place = [str(part) for part in wrong["loc"][1:]]
    message = MESSAGES.get(wrong["type"], str(wrong["msg"]).removeprefix("Value error, "))
    for number, part in enumerate(place[:-1]):
        if part in EITHER:  # after it comes which of its types was tried
            place, message = place[: number + 1], EITHER[part]
            break
    if not place:
        text = message if wrong["type"] == "value_error" else "the body must be a JSON object, sent as application/json"
        return ApiError(400, text).response()
    return ApiError(400, f"{'.'.join(place)}: {message[:1].lower()}{message[1:]}", param=place[0]).response()


async def _http_error(request: Request, error: HTTPException) -> Response:
    if error.status_code == 404:
        message = f"there is no route {request.method} {request.url.path}"
        return ApiError(404, message, code="unknown_url").response()
    if error.status_code == 405:
        message = f"{request.url.path} does not take {request.method}"
        return ApiError(405, message, code="method_not_allowed", headers=error.headers).response()
    if error.status_code == 400:  # a body that Python's parser gives up on: too deep, no UTF-8, numbers too long
        return ApiError(400, "the body is not JSON that can be read", code="invalid_json").response()
    return ApiError(error.status_code, str(error.detail), headers=error.headers).response()


async def _defect(_: Request, error: Exception) -> Response:
    return ApiError(500, f"the server failed: {type(error).__name__}", code="internal_error").response()
