"""Tools of MCP servers, over stdio or streamable HTTP: the only file that imports `mcp`.

A server is started when its tools are listed and started again when a call finds it gone.
"""

import asyncio
import logging
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TextIO, cast, final

from httpx2 import AsyncByteStream, Response, StreamError
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.shared._httpx_utils import create_mcp_http_client
from mcp.types import CONNECTION_CLOSED, CallToolResult, TextContent

from luyen.base.boundary import boundary
from luyen.base.errors import UserError, did_you_mean
from luyen.base.records import Prompt
from luyen.rollout.tools.executors import BackgroundLoop
from luyen.rollout.tools.protocol import ToolLimits, ToolReply, ToolSession, as_text
from luyen.rollout.tools.rollout_tools import idempotency_key
from luyen.rollout.tools.user_code import ToolError, line_of, one_line

# Size limit of HTTP responses, which are read into memory.

MAX_RESPONSE_BYTES = 32 * 2**20
"""The longest body of one answer. Streams of events have no end, and a limit for each event."""
IDENTITY_ENCODING = {"Accept-Encoding": "identity"}
"""A header without which a small answer might unpack to any size."""


async def limit_response(response: Response) -> None:
    """Limit the size of a response; the limit holds after the caller is cancelled, too."""
    packed = response.headers.get("content-encoding", "identity")
    if packed != "identity":
        raise StreamError(f"the answer is packed ({packed}), and was wanted as it is")
    kind = response.headers.get("content-type", "")
    if isinstance(response.stream, AsyncByteStream) and not kind.startswith("text/event-stream"):
        response.stream = _BoundedStream(response.stream)


@final
class _BoundedStream(AsyncByteStream):
    """A body that ends with an error where it is too long."""

    def __init__(self, inner: AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for part in self._inner:
            size += len(part)
            if size > MAX_RESPONSE_BYTES:
                raise StreamError(f"the answer has more than {MAX_RESPONSE_BYTES // 2**20} MiB")
            yield part

    async def aclose(self) -> None:
        await self._inner.aclose()


# A server that writes anything but responses would fill the terminal with tracebacks.
logging.getLogger("mcp.client").setLevel(logging.CRITICAL)

_END_S = 15.0
"""Most seconds for a server to end; its process is killed well before."""
_LAST_BYTES = 2000
_READ_S = 1.0
_KEY = "luyen/idempotency-key"
"""Key of a request's `_meta` with the idempotency key of its call."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class McpTarget:
    """A server's command, or its address.

    Example:
        >>> McpTarget(command=("python", "server.py")).url is None
        True
    """

    command: tuple[str, ...] = ()
    """Program and arguments of a server that speaks over stdio."""
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    """Environment variables, in addition to PATH, HOME and the like."""
    cwd: str | None = None
    """Its working directory."""
    url: str | None = None
    """Address of a server that speaks streamable HTTP."""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Headers of every request, e.g. `Authorization`."""
    start_s: float = 30.0
    """Most seconds until it answers."""

    def __str__(self) -> str:
        return self.url or " ".join(self.command)


@final
class _ErrorTail:
    """The end of what a server prints to its standard error, however much that is."""

    def __init__(self) -> None:
        self._kept = b""
        self._file: TextIO | None = None
        self._reader: threading.Thread | None = None

    def open(self) -> TextIO:
        """A file for a server that is started; what an earlier one printed is forgotten."""
        reading, writing = os.pipe()
        self._kept = b""
        self._file = os.fdopen(writing, "w")
        self._reader = threading.Thread(
            target=self._read, args=(reading,), name="mcp errors", daemon=True
        )
        self._reader.start()
        return self._file

    def release(self) -> None:
        """Leave the file to the server: reading ends when the server does."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def text(self) -> str:
        """The last of it; once the server has ended, all that came before is read."""
        if self._reader is not None:
            self._reader.join(_READ_S)
        return self._kept.decode(errors="replace")

    def _read(self, handle: int) -> None:
        with os.fdopen(handle, "rb", buffering=0) as stream:
            while part := stream.read(2**16):
                self._kept = (self._kept + part)[-_LAST_BYTES:]


@final
class McpServer:
    """One connection, kept over all steps of a run and reopened when it breaks."""

    def __init__(self, target: McpTarget) -> None:
        self.target = target
        self._background = BackgroundLoop("mcp")
        self._close_lock = threading.Lock()
        self._connect_lock = asyncio.Lock()
        self._client: Client | None = None
        self._holder: asyncio.Task[None] | None = None
        self._stop = asyncio.Event()
        self._said = _ErrorTail()

    def list_tools(self) -> list[dict[str, Any]]:
        """Name, description and parameters of every tool; a UserError when it does not answer."""
        faults: list[BaseException] = []
        with boundary(faults):
            return self._background.wait(self._list(), seconds=self.target.start_s + 5.0)
        self.close()
        why = f"the MCP server does not answer: {line_of(_innermost(faults[0]))}"
        raise UserError("mcp", str(self.target), why, "start it by hand to see why it fails")

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of a tool's result; ToolError when the server reports an error of the call."""
        result = await self._background.run(self._call(name, arguments, idempotency_key()))
        text = _text(result)
        if result.is_error:
            raise ToolError(text or "the tool reports an error without a message")
        return text

    def close(self) -> None:
        """End the connection, and the server's process if it has one. Twice is allowed."""
        with self._close_lock:  # each tool of the server closes it
            with boundary([]):
                self._background.wait(self._end(), seconds=_END_S)
            self._background.stop()
            self._said.release()

    async def _list(self) -> list[dict[str, Any]]:
        client = await self._connect()
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            page = await client.list_tools(cursor=cursor)
            found += [
                {"name": t.name, "description": t.description or "", "parameters": t.input_schema}
                for t in page.tools
            ]
            cursor = page.next_cursor
            if cursor is None:
                return found

    async def _call(
        self, name: str, arguments: Mapping[str, Any], key: str | None
    ) -> CallToolResult:
        client = await self._connect()
        try:
            # A server that knows such keys can tell a call that is made again from a new one.
            meta: Any = None if key is None else {_KEY: key}
            return await client.call_tool(name, dict(arguments), meta=meta)
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                self._drop(client)
            raise
        except (OSError, RuntimeError, ExceptionGroup):
            self._drop(client)
            raise

    async def _connect(self) -> Client:
        async with self._connect_lock:
            if self._client is None:
                up = asyncio.get_running_loop().create_future()
                self._stop = asyncio.Event()
                self._holder = asyncio.create_task(self._keep_open(up, self._stop))
                first = asyncio.FIRST_COMPLETED
                limit = self.target.start_s
                await asyncio.wait({up, self._holder}, timeout=limit, return_when=first)
            if self._client is None:
                raise ConnectionError(self._reason())
            return self._client

    async def _keep_open(self, up: "asyncio.Future[None]", stop: asyncio.Event) -> None:
        """Keep the connection open until `stop` is set: it must end in the task that began it."""
        client: Client | None = None
        try:
            async with self._transport() as transport, Client(transport) as client:
                self._client = client
                self._said.release()
                up.set_result(None)
                await stop.wait()
        finally:
            self._said.release()
            if self._client is client:
                self._client = None

    @asynccontextmanager
    async def _transport(self) -> AsyncGenerator[Any]:
        target = self.target
        if target.url is None:
            program, *arguments = target.command
            started = StdioServerParameters(
                command=program, args=arguments, env=dict(target.env), cwd=target.cwd
            )
            yield stdio_client(started, errlog=self._said.open())
        else:
            async with create_mcp_http_client(
                headers={**IDENTITY_ENCODING, **target.headers}
            ) as http:
                http.event_hooks = {"response": [limit_response]}
                yield streamable_http_client(target.url, http_client=http)

    def _drop(self, client: Client) -> None:
        """Give up a connection that broke, so that the next call makes another."""
        if self._client is client:
            self._client = None
            self._stop.set()

    def _reason(self) -> str:
        self._stop.set()
        holder = self._holder
        if holder is None or not holder.done():
            return f"no answer within {self.target.start_s:g} s"
        fault = None if holder.cancelled() else holder.exception()
        said = self._said.text().strip().splitlines()
        last = f"; it said: {one_line(said[-1])}" if said else ""
        return (line_of(_innermost(fault)) if fault is not None else "it went away") + last

    async def _end(self) -> None:
        self._stop.set()
        if self._holder is not None:
            await asyncio.wait({self._holder})


@final
class McpTool:
    """One tool of a server."""

    def __init__(
        self, server: McpServer, entry: Mapping[str, Any], *, name: str, limits: ToolLimits
    ) -> None:
        self._server = server
        self._server_name = str(entry["name"])
        self._name = name
        self._limits = limits
        self._schema = {"type": "function", "function": {**entry, "name": name}}

    @property
    def name(self) -> str:
        """How the policy calls it: the server's name for it, with the prefix."""
        return self._name

    @property
    def schema(self) -> Mapping[str, Any]:
        """The server's schema."""
        return self._schema

    @property
    def limits(self) -> ToolLimits:
        """Timeout, retries and concurrency."""
        return self._limits

    async def open(self, prompt: Prompt, key: int) -> ToolSession:
        """All rollouts share the server and whatever state it has."""
        del prompt, key
        return _Session(self._server, self._server_name)

    async def close(self) -> None:
        """End the server, which its other tools share."""
        await asyncio.to_thread(self._server.close)


@final
class _Session:
    def __init__(self, server: McpServer, name: str) -> None:
        self._server = server
        self._name = name

    async def call(self, arguments: Mapping[str, Any]) -> ToolReply:
        return ToolReply(text=await self._server.call(self._name, arguments))

    async def score(self) -> float | None:
        return None

    async def release(self) -> None:
        return None


def mcp_tools(
    target: McpTarget,
    *,
    select: Sequence[str] | None = None,
    prefix: str = "",
    limits: ToolLimits | None = None,
) -> list[McpTool]:
    """The tools of a server: those selected (None: all), under their names with a prefix.

    A UserError when the server does not answer, or has no tool of a selected name.
    """
    server = McpServer(target)
    found = {entry["name"]: entry for entry in server.list_tools()}
    for name in select or ():
        if name not in found:
            server.close()
            why = f"the MCP server {target} has no tool of this name"
            raise UserError("mcp.select", name, why, did_you_mean(name, found))
    return [
        McpTool(server, entry, name=f"{prefix}{name}", limits=limits or ToolLimits())
        for name, entry in found.items()
        if select is None or name in select
    ]


def _text(result: CallToolResult) -> str:
    texts = [
        block.text if isinstance(block, TextContent) else f"[{block.type}]"
        for block in result.content
    ]
    if not texts and result.structured_content is not None:
        return as_text(result.structured_content)
    return "\n".join(texts)


def _innermost(fault: BaseException) -> BaseException:
    """The first exception inside groups of them."""
    if isinstance(fault, BaseExceptionGroup):
        inner: tuple[BaseException, ...] = cast(Any, fault).exceptions
        return _innermost(inner[0])
    return fault
