"""An HTTP API with a key: what it answers never holds the key, and its errors have one form."""

import base64
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, Literal, cast, final
from urllib.parse import quote

from luyen.base.http import Response, send

SHOWN = 160
"""Characters that are quoted of a reply."""
_HIDDEN = "(the key)"
_LEAST_SECRET = 8
"""Characters of a key that is worth hiding in replies."""


@final
class ApiEndpoint:
    """A server under one address, such as `https://host/v1`; the caller waits and retries.

    Example:
        >>> ApiEndpoint("http://127.0.0.1:8000/v1/", key=None).url
        'http://127.0.0.1:8000/v1'
    """

    def __init__(self, url: str, *, key: str | None) -> None:
        self.url = url.rstrip("/")
        self._key = key
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"

    async def request(
        self,
        method: Literal["GET", "POST"],
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        most_bytes: int,
        take: Callable[[bytes], object] | None = None,
    ) -> Response:
        """The answer, in which the key is hidden; an HttpError when there is none.

        `take` gets the pieces of a successful answer as they arrive, with nothing hidden.
        """
        sent = b"" if body is None else json.dumps(body, allow_nan=False).encode()
        url = f"{self.url}{path}"
        return self._without_key(
            await send(method, url, sent, self._headers, most_bytes=most_bytes, take=take)
        )

    def hidden(self, text: str) -> str:
        """Text that was read from JSON, where any letter may have been an escape."""
        is_secret = self._key is not None and len(self._key) >= _LEAST_SECRET
        return text.replace(self._key or "", _HIDDEN) if is_secret else text

    def _without_key(self, response: Response) -> Response:
        """Servers repeat the key that they refuse, and what they say is recorded.

        It is replaced before anything is read or cut, also where JSON writes it with escapes. A
        short one is no secret but a word, such as `none`: a reply may well say it.
        """
        if self._key is None or (response.status == 200 and len(self._key) < _LEAST_SECRET):
            return response
        body = response.body
        spellings = {self._key, json.dumps(self._key)[1:-1], self._key.replace("/", "\\/")}
        coded = {quote(self._key, safe=""), base64.b64encode(self._key.encode()).decode()}
        for spelling in spellings | coded:
            body = body.replace(spelling.encode(), _HIDDEN.encode())
        return replace(response, body=body)


def error_message(response: Response) -> str:
    """What a server says about an error: its message where it has one.

    Example:
        >>> error_message(Response(status=400, headers={}, body=b'{"error": {"message": "no"}}'))
        'no'
    """
    try:
        error: Any = json.loads(response.body)["error"]
        return str(cast(dict[str, Any], error)["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, RecursionError):
        return quoted_body(response.body)


def quoted_body(body: bytes) -> str:
    """The beginning of a body, as errors quote it.

    Example:
        >>> quoted_body(b"<html>")
        "'<html>'"
    """
    return repr(body[:SHOWN].decode(errors="replace"))


def retry_after_s(response: Response) -> float | None:
    """Seconds that the server wants us to wait: it writes a number, or a date.

    Example:
        >>> retry_after_s(Response(status=429, headers={"retry-after": "2"}, body=b""))
        2.0
    """
    text = response.headers.get("retry-after", "").strip()
    if text.isdecimal() and text.isascii():
        return float(text[:9])
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, OverflowError):  # a year of eleven digits
        return None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return max(0.0, (at - datetime.now(UTC)).total_seconds())
