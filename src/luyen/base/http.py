"""One HTTP request on the event loop: it never blocks, and awaiting it can be cancelled.

A connection per request, HTTP/1.1, no redirects, no proxies. A body is read up to a limit.
"""

import asyncio
import io
import ssl
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException, parse_headers
from typing import Literal, final
from urllib.parse import urlsplit


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What a server answered.

    Example:
        >>> Response(status=429, headers={"retry-after": "2"}, body=b"").headers["retry-after"]
        '2'
    """

    status: int
    """The code: 200 for success."""
    headers: Mapping[str, str]
    """Header lines, names in small letters."""
    body: bytes
    """The content, chunks put together."""


@final
class HttpError(Exception):
    """No answer from a server, or none that is HTTP.

    Example:
        >>> HttpError("connection", "refused").kind
        'connection'
    """

    def __init__(self, kind: Literal["connection", "too_long"], detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


async def send(
    method: Literal["GET", "POST"],
    url: str,
    body: bytes,
    headers: Mapping[str, str],
    *,
    most_bytes: int,
    take: Callable[[bytes], object] | None = None,
) -> Response:
    """Send a request; the answer. An HttpError when there is none, or when it is not HTTP.

    `take` gets the pieces of the body of a successful answer as they arrive.
    """
    parts = urlsplit(url)
    is_secure = parts.scheme == "https"
    writer: asyncio.StreamWriter | None = None
    try:
        reader, writer = await asyncio.open_connection(
            parts.hostname,
            parts.port or (443 if is_secure else 80),
            ssl=_secure() if is_secure else None,
            limit=2**17,
        )
        host = parts.netloc.rpartition("@")[2]
        writer.write(_head(method, host, _path(url), len(body), headers) + body)
        await writer.drain()
        return await _answer(reader, most_bytes, take or _ignore)
    except (OSError, EOFError, ssl.SSLError) as error:
        raise HttpError("connection", f"{type(error).__name__}: {error}") from error
    except (ValueError, HTTPException, asyncio.LimitOverrunError) as error:
        raise HttpError("connection", "the server does not speak HTTP") from error
    finally:
        if writer is not None:
            with suppress(OSError):
                writer.transport.abort()


@cache
def _secure() -> ssl.SSLContext:
    return ssl.create_default_context()


def _path(url: str) -> str:
    parts = urlsplit(url)
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _head(method: str, host: str, path: str, length: int, headers: Mapping[str, str]) -> bytes:
    lines = {"Host": host, "Connection": "close", "Content-Length": str(length), **headers}
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{text}\r\n".encode("latin-1")


def _ignore(_: bytes) -> None:
    """Pieces of a body that is read as a whole."""


async def _answer(
    reader: asyncio.StreamReader, most_bytes: int, take: Callable[[bytes], object]
) -> Response:
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        first, _, rest = head.partition(b"\r\n")
        version, code = first.split()[:2]
        if not version.startswith(b"HTTP/"):
            raise ValueError(first)
        if not 100 <= int(code) < 200:  # a provisional answer comes before the real one
            break
    headers = {name.lower(): text for name, text in parse_headers(io.BytesIO(rest)).items()}
    body = await _body(reader, headers, most_bytes, take if code == b"200" else _ignore)
    return Response(status=int(code), headers=headers, body=body)


async def _body(
    reader: asyncio.StreamReader,
    headers: Mapping[str, str],
    most_bytes: int,
    take: Callable[[bytes], object],
) -> bytes:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return await _chunks(reader, most_bytes, take)
    if "content-length" in headers:
        length = int(headers["content-length"])
        whole = await reader.readexactly(_allowed(length, most_bytes))
        take(whole)
        return whole
    found = bytearray()
    while part := await reader.read(2**16):
        found += part
        _allowed(len(found), most_bytes)
        take(part)
    return bytes(found)


async def _chunks(
    reader: asyncio.StreamReader, most_bytes: int, take: Callable[[bytes], object]
) -> bytes:
    found = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        _allowed(len(found) + size, most_bytes)
        part = await reader.readexactly(size)
        found += part
        take(part)
        await reader.readexactly(2)
    return bytes(found)


def _allowed(length: int, most_bytes: int) -> int:
    if length < 0:
        raise ValueError(length)
    if length > most_bytes:
        raise HttpError("too_long", f"a body of {length} bytes or more; {most_bytes} are read")
    return length
