"""A tool server behind an address cannot fill the memory of a run."""

import asyncio
from collections.abc import AsyncIterator

import pytest

pytest.importorskip("httpx2", reason="the extra `tools` is not installed")
import httpx2 as httpx

from luyen.rollout.tools import mcp


class Endless(httpx.AsyncByteStream):
    """A body without an end."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 65536


def read(headers: dict[str, str], *, limit: int | None = None) -> int:
    """How many bytes of an endless answer with these headers are read, up to a limit."""

    async def run() -> int:
        answer = httpx.Response(200, headers=headers, stream=Endless())
        size = 0
        async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: answer)) as client:
            client.event_hooks = {"response": [mcp.limit_response]}
            async with client.stream("GET", "http://server/") as response:
                async for part in response.aiter_raw():
                    size += len(part)
                    if limit is not None and size >= limit:
                        break
        return size

    return asyncio.run(run())


def test_an_answer_without_an_end_is_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mcp, "MAX_RESPONSE_BYTES", 2**20)
    with pytest.raises(httpx.StreamError, match="more than 1 MiB"):
        read({"content-type": "application/json"})


def test_an_answer_that_is_packed_is_refused():
    with pytest.raises(httpx.StreamError, match="packed"):
        read({"content-type": "application/json", "content-encoding": "gzip"})


def test_a_stream_of_events_goes_on(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(mcp, "MAX_RESPONSE_BYTES", 2**20)
    assert read({"content-type": "text/event-stream"}, limit=4 * 2**20) >= 4 * 2**20
