"""How much an MCP server behind an address may send: what it says is held in memory."""

from collections.abc import AsyncIterator
from typing import final

from httpx2 import AsyncByteStream, Response, StreamError

MOST_BYTES = 32 * 2**20
"""The longest body of one answer. Streams of events have no end, and a limit for each event."""
PLAIN = {"Accept-Encoding": "identity"}
"""A header without which a small answer might unpack to any size."""


async def refuse_excess(response: Response) -> None:
    """Bound what is read of a response, also after nobody waits for it any more."""
    packed = response.headers.get("content-encoding", "identity")
    if packed != "identity":
        raise StreamError(f"the answer is packed ({packed}), and was wanted as it is")
    kind = response.headers.get("content-type", "")
    if isinstance(response.stream, AsyncByteStream) and not kind.startswith("text/event-stream"):
        response.stream = _Bounded(response.stream)


@final
class _Bounded(AsyncByteStream):
    """A body that ends with an error where it is too long."""

    def __init__(self, inner: AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        size = 0
        async for part in self._inner:
            size += len(part)
            if size > MOST_BYTES:
                raise StreamError(f"the answer has more than {MOST_BYTES // 2**20} MiB")
            yield part

    async def aclose(self) -> None:
        await self._inner.aclose()
