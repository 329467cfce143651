"""One HTTP request on the event loop: nothing blocks, and whoever waits can stop waiting.

A connection per request, HTTP/1.1, no redirects, no proxies. A body is read up to a limit.
"""

import asyncio
import io
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException, parse_headers
from typing import final
from urllib.parse import urlsplit

from luyen.rewards.judge_faults import CONNECTION, TOO_LONG, JudgeFault

MOST_BYTES = 2**20
"""Most bytes of a body; a reply is far shorter."""


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


async def post(url: str, body: bytes, headers: Mapping[str, str]) -> Response:
    """Send a body; the answer. A JudgeFault when there is none, or when it is not HTTP."""
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
        writer.write(_head(parts.netloc.rpartition("@")[2], _path(url), len(body), headers) + body)
        await writer.drain()
        return await _answer(reader)
    except (OSError, EOFError, ssl.SSLError) as error:
        raise JudgeFault(CONNECTION, f"{type(error).__name__}: {error}") from error
    except (ValueError, HTTPException, asyncio.LimitOverrunError) as error:
        raise JudgeFault(CONNECTION, "the server does not speak HTTP") from error
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


def _head(host: str, path: str, length: int, headers: Mapping[str, str]) -> bytes:
    lines = {"Host": host, "Connection": "close", "Content-Length": str(length), **headers}
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{text}\r\n".encode("latin-1")


async def _answer(reader: asyncio.StreamReader) -> Response:
    while True:
        head = await reader.readuntil(b"\r\n\r\n")
        first, _, rest = head.partition(b"\r\n")
        version, code = first.split()[:2]
        if not version.startswith(b"HTTP/"):
            raise ValueError(first)
        if not 100 <= int(code) < 200:  # a provisional answer comes before the real one
            break
    headers = {name.lower(): text for name, text in parse_headers(io.BytesIO(rest)).items()}
    return Response(status=int(code), headers=headers, body=await _body(reader, headers))


async def _body(reader: asyncio.StreamReader, headers: Mapping[str, str]) -> bytes:
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return await _chunks(reader)
    if "content-length" in headers:
        length = int(headers["content-length"])
        return await reader.readexactly(_allowed(length))
    found = bytearray()
    while part := await reader.read(2**16):
        found += part
        _allowed(len(found))
    return bytes(found)


async def _chunks(reader: asyncio.StreamReader) -> bytes:
    found = bytearray()
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        _allowed(len(found) + size)
        found += await reader.readexactly(size)
        await reader.readexactly(2)
    return bytes(found)


def _allowed(length: int) -> int:
    if length < 0:
        raise ValueError(length)
    if length > MOST_BYTES:
        raise JudgeFault(TOO_LONG, f"a body of {length} bytes or more; {MOST_BYTES} are read")
    return length
