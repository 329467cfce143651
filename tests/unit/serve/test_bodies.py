"""Large bodies are read beside the event loop, so that other callers are answered meanwhile."""

import asyncio
import threading
from typing import Any

import pytest

from luyen.serve import app
from luyen.serve.dispatch import ServeLimits


class Sent:
    """A request with a body."""

    def __init__(self, body: bytes) -> None:
        self.headers = {"content-type": "application/json"}
        self._body = body

    async def stream(self) -> Any:
        """The body as one piece."""
        yield self._body


@pytest.mark.parametrize(("size", "is_beside"), [(10, False), (200_000, True)])
def test_a_large_body_does_not_hold_up_the_loop(
    monkeypatch: pytest.MonkeyPatch, size: int, is_beside: bool
):
    seen: list[int] = []
    parse = app.parse_body

    def watched(raw: bytes) -> dict[str, Any]:
        seen.append(threading.get_ident())
        return parse(raw)

    monkeypatch.setattr(app, "parse_body", watched)
    sent: Any = Sent(b'{"prompt": "' + b"a" * size + b'"}')
    assert len(asyncio.run(app.read_body(sent, ServeLimits()))["prompt"]) == size
    assert [one != threading.get_ident() for one in seen] == [is_beside]
