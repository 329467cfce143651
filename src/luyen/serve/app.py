"""The HTTP application: routes, access, bodies with limits, and errors as OpenAI writes them."""

import asyncio
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
)
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar, final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from luyen.base.errors import UserError
from luyen.serve.access import Keyring, demand_key, refuse_foreign_host
from luyen.serve.dispatch import ServeLimits
from luyen.serve.failures import ApiFailure, refused
from luyen.serve.fields import parse_body
from luyen.serve.metrics import CONTENT_TYPE, ServerMetrics
from luyen.serve.service import Body, Endpoints, ReplyPlan

T = TypeVar("T")
Handler: TypeAlias = Callable[[Request], Awaitable[Response]]
_QUICK_BYTES = 65_536
"""Bodies up to this size are read on the event loop."""
_GONE = 499
"""Status in metrics and logs of a request whose client went away; it is never sent."""


@final
class Gate:
    """Decides whether a request is let in, before its body is read."""

    def __init__(self, *, keys: Keyring, admin_keys: Keyring) -> None:
        """Without keys everything but the administration is open, to callers of this machine."""
        self._keys = keys
        self._admin_keys = admin_keys

    def check(self, request: Request) -> None:
        """A failure unless the request may go on; /health is open to all."""
        # The path that is routed by; `request.url` is put together with the client's Host header.
        path = request.scope["path"]
        if path == "/health":
            return
        if path.startswith("/admin/"):
            if self._admin_keys.is_empty:
                why = "the server was started without an admin key"
                raise ApiFailure(403, f"{path}: {why}", type="permission_error", code="no_admin")
            demand_key(request.headers, [self._admin_keys])
        elif self._keys.is_empty:
            refuse_foreign_host(request.headers)
        else:
            demand_key(request.headers, [self._keys, self._admin_keys])


async def read_body(request: Request, limits: ServeLimits) -> Body:
    """The JSON body, within the limits of size and time."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # A web page of another site can make a browser send any other type without asking first.
        message = "Content-Type: it is not application/json. Fix: send that header"
        raise ApiFailure(415, message, param="Content-Type", code="wrong_content_type")
    most = limits.max_body_bytes
    length = request.headers.get("content-length", "0")
    if length.isdigit() and int(length) > most:
        raise _too_large(most)
    raw = bytearray()
    try:
        async with asyncio.timeout(limits.body_timeout_s):
            async for piece in request.stream():
                raw += piece
                if len(raw) > most:
                    raise _too_large(most)
    except TimeoutError:
        message = f"body: it did not arrive within {limits.body_timeout_s:g} seconds"
        raise ApiFailure(408, message, param="body", code="slow_body") from None
    except ClientDisconnect:
        message = "body: the connection was closed before all of it had arrived"
        raise ApiFailure(400, message, param="body", code="cut_body") from None
    if len(raw) <= _QUICK_BYTES:
        return parse_body(bytes(raw))
    return await asyncio.to_thread(parse_body, bytes(raw))  # the event loop answers other callers


def _too_large(most: int) -> ApiFailure:
    message = f"body: it is larger than {most} bytes. Fix: send less at once"
    return ApiFailure(413, message, param="body", code="body_too_large")


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What the work gives; cancelled where the client goes away before."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ApiFailure(_GONE, "the client went away")
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.wait({task, gone})


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def failure_response(failure: ApiFailure) -> JSONResponse:
    """A failure as a reply."""
    return JSONResponse(failure.body(), status_code=failure.status, headers=failure.headers)


class HttpService(Protocol):
    """What the application needs of any service."""

    limits: ServeLimits
    metrics: ServerMetrics

    def endpoints(self) -> Endpoints:
        """What is answered at which path."""
        ...

    async def one_model(self, name: str) -> Body:
        """The card of a model."""
        ...

    async def close(self) -> None:
        """End what runs."""
        ...


def build_app(service: HttpService, gate: Gate) -> FastAPI:
    """The application; nothing of it is documented by itself, since bodies are read by hand."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await service.close()

    async def metrics(_: Request) -> Response:
        return Response(service.metrics.page(), media_type=CONTENT_TYPE)

    async def one_model(request: Request) -> Response:
        return JSONResponse(await service.one_model(request.path_params["name"]))

    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    found = service.endpoints()
    routes: list[tuple[str, str, Handler]] = [
        *(("POST", path, _generating(service.limits, make)) for path, make in found.jobs.items()),
        *(("POST", path, _posting(service.limits, act)) for path, act in found.posts.items()),
        *(("GET", path, _getting(read)) for path, read in found.gets.items()),
        ("GET", "/metrics", metrics),
        ("GET", "/v1/models/{name:path}", one_model),
    ]
    for method, path, handler in routes:
        answer = partial(_counted, service, path, gate, handler)
        # Starlette tells a coroutine function from a partial one; FastAPI would read its arguments.
        app.router.add_route(path, answer, methods=[method])
    _answer_errors(app)
    return app


def _posting(limits: ServeLimits, act: Callable[[Body], Awaitable[Body]]) -> Handler:
    async def answer(request: Request) -> Response:
        body = await read_body(request, limits)
        return JSONResponse(await while_connected(request, _coroutine(act(body))))

    return answer


def _getting(read: Callable[[], Awaitable[Body]]) -> Handler:
    async def answer(_: Request) -> Response:
        return JSONResponse(await read())

    return answer


def _generating(limits: ServeLimits, make: Callable[[Body], Awaitable[ReplyPlan]]) -> Handler:
    async def answer(request: Request) -> Response:
        body = await read_body(request, limits)
        generation = await make(body)
        if not generation.is_streaming:
            return JSONResponse(await while_connected(request, generation.reply()))
        stream = generation.stream()
        # Until the first token a failure has a status of its own.
        first = await while_connected(request, _coroutine(anext(stream)))

        async def pieces() -> AsyncGenerator[bytes]:
            async with aclosing(stream):
                yield first
                async for piece in stream:
                    yield piece

        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        return StreamingResponse(pieces(), media_type="text/event-stream", headers=headers)

    return answer


async def _coroutine(work: Awaitable[T]) -> T:
    return await work


def _answer_errors(app: FastAPI) -> None:
    """What the framework itself refuses, and what was not expected, in OpenAI's form."""

    async def framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        message = f"{request.method} {request.url.path[:200]}: {error.detail}"
        code = "unknown_url" if error.status_code == 404 else None
        return failure_response(ApiFailure(error.status_code, message, param="url", code=code))

    async def unexpected(_: Request, __: Exception) -> Response:
        # The server's log has the traceback; a client learns nothing of it.
        return failure_response(ApiFailure(500, "the server failed", type="server_error"))

    app.add_exception_handler(HTTPException, framework)
    app.add_exception_handler(Exception, unexpected)


async def _counted(
    service: HttpService, path: str, gate: Gate, handler: Handler, request: Request
) -> Response:
    """A reply, or the failure that took its place; both are counted."""
    start = time.monotonic()
    try:
        gate.check(request)
        response = await handler(request)
    except ApiFailure as failure:
        response = failure_response(failure)
    except UserError as error:
        response = failure_response(refused(error))
    if response.status_code == _GONE:
        service.metrics.aborted.inc()
    service.metrics.requests.labels(path, str(response.status_code)).inc()
    timer = service.metrics.seconds.labels(path)
    if isinstance(response, StreamingResponse):
        response.body_iterator = _timed(response.body_iterator, timer.observe, start)
    else:
        timer.observe(time.monotonic() - start)
    return response


async def _timed(
    pieces: AsyncIterable[T], observe: Callable[[float], None], start: float
) -> AsyncGenerator[T]:
    """The pieces; the time until the last of them, or until the client went away, is observed."""
    try:
        async for piece in pieces:
            yield piece
    finally:
        observe(time.monotonic() - start)
