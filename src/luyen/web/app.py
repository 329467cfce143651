"""The HTTP application of the studio: access, the files of the page, and errors.

The routes that read are `luyen.web.reading_routes`, those that act `luyen.studio.actions.routes`.
"""

import asyncio
import hashlib
import html
import mimetypes
import sys
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from importlib import resources
from pathlib import Path
from typing import Any, final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, Response
from starlette.exceptions import HTTPException

from luyen import __version__
from luyen.base.errors import UserError
from luyen.serve.server import Access, open_socket, serve, url_of
from luyen.studio.actions.chats import Chats
from luyen.studio.actions.job_queue import JobQueue
from luyen.studio.actions.routes import ActingRoutes, MessageRequest
from luyen.studio.screens.folder import Refusal
from luyen.studio.screens.live import json_bytes
from luyen.studio.screens.server_cache import Studio, StudioOptions
from luyen.web.access import StudioAccess, no_build_page, no_token_page, small_page
from luyen.web.reading_routes import ReadingRoutes, event_stream

BASE = "/api/v1"
_MOST_BODY = 4 * 2**20
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:;"
    " font-src 'self'; connect-src 'self'; frame-ancestors 'none'; base-uri 'none';"
    " form-action 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
_SCAN_S = 2.0
_SWITCH_S = 0.0005
"""Seconds after which a thread gives the interpreter to one that waits for it. An answer passes it
between threads many times; with the default of 5 ms, background reading delayed each of them."""
Scope = dict[str, Any]
AsgiApp = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Any]


@final
class JsonReply(Response):
    """A reply whose numbers are all finite."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """The body."""
        return json_bytes(content)


@final
class AccessCheck:
    """Checks every request before a route sees it, and adds the headers of every reply."""

    def __init__(self, app: AsgiApp, access: StudioAccess) -> None:
        self._app = app
        self._access = access

    async def __call__(
        self,
        scope: Scope,
        receive: Callable[[], Awaitable[Any]],
        send: Callable[[Any], Awaitable[None]],
    ) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                extra = [(n.lower().encode(), v.encode()) for n, v in _HEADERS.items()]
                message = {**message, "headers": [*message.get("headers", []), *extra]}
            await send(message)

        headers = {n.decode("latin-1"): v.decode("latin-1") for n, v in scope["headers"]}
        try:
            self._check(scope, headers)
        except Refusal as refusal:
            reply: Response = refused(refusal)
            if refusal.status == 401 and not scope["path"].startswith("/api"):
                reply = HTMLResponse(no_token_page(), status_code=401)
            await reply(scope, receive, with_headers)
            return
        token = self._access.given_in(scope["query_string"].decode("latin-1"))
        if scope["path"] == "/" and token is not None:
            reply = Response(status_code=303, headers={"Location": "/"})
            reply.headers["Set-Cookie"] = self._access.set_cookie()
            reply.headers["Cache-Control"] = "no-store"
            await reply(scope, receive, with_headers)
            return
        await self._app(scope, receive, with_headers)

    def _check(self, scope: Scope, headers: Mapping[str, str]) -> None:
        self._access.check_host(headers)
        if scope["path"] == "/" and self._access.given_in(scope["query_string"].decode("latin-1")):
            return
        self._access.check_token(headers)
        if scope["method"] not in ("GET", "HEAD"):
            self._access.check_change(headers)
            # A body in chunks says no length.
            length = headers.get("content-length", "?" if "transfer-encoding" in headers else "0")
            if not length.isdigit() or int(length) > _MOST_BODY:
                raise Refusal(413, f"more than {_MOST_BODY:,} bytes, or no length", field="body")


def refused(refusal: Refusal) -> JsonReply:
    """A refusal as a reply."""
    return JsonReply(refusal.body(), status_code=refusal.status)


def run_studio(
    options: StudioOptions, *, host: str, port: int, announce: Callable[[str], object]
) -> int:
    """Serve the page until a signal; `announce` gets its address. Returns the exit code."""
    if not options.folder.is_dir() and options.folder != Path("runs"):
        fix = "give the folder that trainer.default_local_dir names"
        raise UserError("FOLDER", str(options.folder), "no such folder", fix)
    opened = open_socket(Access(host=host, port=port))
    access = StudioAccess(port=opened.getsockname()[1])
    address = access.url(url_of(opened))
    app = build_app(Studio(options), access)
    sys.setswitchinterval(_SWITCH_S)

    def ready() -> None:
        announce(address)

    return serve(app, opened, drain_s=1, ready=ready)


def build_app(studio: Studio, access: StudioAccess) -> FastAPI:
    """The application."""
    ended = threading.Event()
    acting = None if studio.options.is_read_only else _acting(studio)
    routes = ReadingRoutes(studio, acting)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        scanner = threading.Thread(target=_scan, args=(studio, acting, ended), daemon=True)
        scanner.start()
        yield
        ended.set()
        scanner.join()
        routes.close()
        studio.close()

    app = FastAPI(
        title="Luyen studio",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url=f"{BASE}/openapi.json",
        default_response_class=JsonReply,
        lifespan=lifespan,
    )
    app.add_middleware(AccessCheck, access=access)  # pyright: ignore[reportArgumentType]
    _add(app, "GET", routes.table())
    _add(app, "POST", {"/check": routes.check})
    if acting is not None:
        _add(app, "GET", acting.reads())
        _add(app, "POST", {**acting.changes(), "/chats/{chat_id}/messages": _say_route(acting)})
    streams = {"/runs/{run_id}/events": routes.run_events, "/events": routes.folder_events}
    for path, follow in streams.items():
        app.add_api_route(f"{BASE}{path}", follow, methods=["GET"], response_class=Response)
    app.add_api_route(
        f"{BASE}/docs", lambda: HTMLResponse(_docs_page(app)), include_in_schema=False
    )
    app.add_api_route("/{path:path}", _page_file, include_in_schema=False)
    _answer_errors(app)
    return app


def _acting(studio: Studio) -> ActingRoutes:
    is_trusting, limit = studio.options.is_trusting, studio.options.running_limit
    chats = Chats(studio.folder, is_trusting=is_trusting)
    return ActingRoutes(
        studio, JobQueue(studio.folder, limit=limit, is_trusting=is_trusting), chats
    )


def _add(app: FastAPI, method: str, routes: Mapping[str, Callable[..., Any]]) -> None:
    for path, answer in routes.items():
        app.add_api_route(f"{BASE}{path}", answer, methods=[method])


def _scan(studio: Studio, acting: ActingRoutes | None, ended: threading.Event) -> None:
    is_prepared = False
    while not ended.is_set():
        studio.folder.scan()
        if acting is not None:
            with suppress(OSError, UserError):  # a full disk, say: it is tried again
                acting.tick()
        if ended.wait(_SCAN_S):
            return
        if not is_prepared:
            prepare_forms()
            is_prepared = True


def prepare_forms() -> None:
    """Load the rules of configurations, so that the first plan and the first form need not wait."""
    from luyen.studio.screens.new_run import check_text, schema_page

    schema_page()
    check_text("{}", ())


def _say_route(acting: ActingRoutes) -> Callable[..., Any]:
    def say(chat_id: str, body: MessageRequest) -> Response:
        """Answers to a message of a chat, as server-sent events."""
        return event_stream(acting.say(chat_id, body))

    return say


# The page: files of the build, and small pages for the cases without one.


def page_folder() -> Path:
    """Where the built page lies."""
    return Path(str(resources.files("luyen") / "web" / "page"))


async def _page_file(path: str, request: Request) -> Response:
    """A file of the page; the page itself for the addresses of its screens.

    A browser that has the same bytes gets none again.
    """
    if path.startswith("api/") or not path.isprintable() or len(path.encode()) > 240:
        raise HTTPException(404)
    home = page_folder()
    name = path or "index.html"
    file = (home / name).resolve()
    if home.resolve() not in file.parents or not file.is_file():
        if Path(name).suffix and name != "index.html":
            raise HTTPException(404)
        file = home / "index.html"
    if not file.is_file():
        return HTMLResponse(no_build_page(BASE), status_code=503)
    kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
    data = await asyncio.to_thread(file.read_bytes)
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'
    headers = {"Cache-Control": "no-cache", "ETag": tag}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    return Response(data, media_type=kind, headers=headers)


def _docs_page(app: FastAPI) -> str:
    """The routes as a plain page; it needs no script and no network."""
    parts: list[str] = []
    for path, methods in app.openapi()["paths"].items():
        for method, facts in methods.items():
            names = ", ".join(p["name"] for p in facts.get("parameters", []))
            said = html.escape(facts.get("description") or facts.get("summary") or "")
            head = f"<code>{method.upper()} {html.escape(path)}</code>"
            parts.append(f"<p>{head}<br>{said}<br><small>{html.escape(names)}</small></p>")
    return small_page("Luyen studio: API", "".join(parts))


def _answer_errors(app: FastAPI) -> None:
    """Every failure in the form of the contract."""

    async def by_us(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return refused(error)

    async def by_user(_: Request, error: Exception) -> Response:
        assert isinstance(error, UserError)
        return refused(Refusal(422, error.why, field=error.field, fix=error.fix))

    async def by_framework(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        what = f"{request.method} {request.scope['path'][:200]}: {error.detail}"
        return refused(Refusal(error.status_code, what, field="url"))

    async def by_letters(_: Request, error: Exception) -> Response:
        assert isinstance(error, UnicodeEncodeError)
        why = "a text of the request holds half of a character (a lone surrogate)"
        return refused(Refusal(422, why, field="body", fix="send whole characters"))

    async def by_form(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"][1:]) or None
        return refused(Refusal(422, f"{field}: {first['msg']}", field=field))

    async def unexpected(_: Request, error: Exception) -> Response:
        # A run directory that is removed while it is read, or damage no reader knows of.
        if isinstance(error, FileNotFoundError):
            return refused(Refusal(404, "a file was removed while it was read", field="run"))
        return refused(Refusal(500, f"the studio failed: {type(error).__name__}"))

    app.add_exception_handler(Refusal, by_us)
    app.add_exception_handler(UserError, by_user)
    app.add_exception_handler(HTTPException, by_framework)
    app.add_exception_handler(RequestValidationError, by_form)
    app.add_exception_handler(UnicodeEncodeError, by_letters)
    app.add_exception_handler(FileNotFoundError, unexpected)
    app.add_exception_handler(Exception, unexpected)
