"""An OpenAI-compatible endpoint: messages go in, the text of the reply comes out."""

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, cast, final
from urllib.parse import quote

from luyen.base.http import HttpError, Response, send
from luyen.base.records import Message
from luyen.config.reward_components import judge_api_key
from luyen.rewards.llm_judge.faults import (
    CONNECTION,
    CUT_OFF,
    EMPTY,
    NOT_JSON,
    SHAPE,
    TOO_LONG,
    JudgeFault,
    quoted_end,
)

MOST_BYTES = 2**20
"""Most bytes of a body; a reply is far shorter."""


async def post(url: str, body: bytes, headers: Mapping[str, str]) -> Response:
    """Send a body; the answer. A JudgeFault when there is none, or when it is not HTTP."""
    try:
        return await send("POST", url, body, headers, most_bytes=MOST_BYTES)
    except HttpError as error:
        kind = TOO_LONG if error.kind == "too_long" else CONNECTION
        raise JudgeFault(kind, str(error)) from error


_SHOWN = 160
_HIDDEN = b"(the key)"
_LEAST_SECRET = 8
"""Characters of a key that is worth hiding in replies."""


@final
class Endpoint:
    """One model of one server; a call sends one request. The caller waits and retries."""

    def __init__(self, base_url: str, *, api_key_env: str | None) -> None:
        """A UserError when the environment does not hold the key."""
        self._url = f"{base_url.rstrip('/')}/chat/completions"
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        self._key: str | None = None
        if api_key_env is not None:
            key = judge_api_key(api_key_env)
            self._headers["Authorization"] = f"Bearer {key}"
            self._key = key

    async def __call__(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> str:
        """The text of the reply; a JudgeFault when there is none. Neither holds the key."""
        payload = {"messages": [dict(message) for message in messages], **settings}
        body = json.dumps(payload, allow_nan=False).encode()
        response = self._without_key(await post(self._url, body, self._headers))
        if response.status != 200:
            kind, said = f"http_{response.status}", self._hidden(_error_message(response))
            raise JudgeFault(kind, said[:_SHOWN], retry_after_s=_retry_after(response))
        return self._hidden(reply_in(response.body))

    def _hidden(self, text: str) -> str:
        """Text that was read from JSON, where any letter may have been an escape."""
        is_secret = self._key is not None and len(self._key) >= _LEAST_SECRET
        return text.replace(self._key or "", _HIDDEN.decode()) if is_secret else text

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
            body = body.replace(spelling.encode(), _HIDDEN)
        return replace(response, body=body)


def reply_in(body: bytes) -> str:
    """The text of the first choice of a chat completion, if it was said to its end.

    Example:
        >>> reply_in(b'{"choices": [{"message": {"content": "Score: 7"}}]}')
        'Score: 7'
    """
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise JudgeFault(NOT_JSON, f"the body is {_cut(body)}") from error
    try:
        choice = found["choices"][0]
        text = choice["message"].get("content")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise JudgeFault(SHAPE, f"no choices[0].message in {_cut(body)}") from error
    if cast(dict[str, Any], choice).get("finish_reason") == "length":
        raise JudgeFault(CUT_OFF, f"max_tokens ended the reply: {quoted_end(str(text or ''))}")
    if text is not None and not isinstance(text, str):
        raise JudgeFault(SHAPE, f"the content is no text in {_cut(body)}")
    if not text or not text.strip():
        raise JudgeFault(EMPTY, "the reply is empty")
    return text


def _error_message(response: Response) -> str:
    """What a server says about an error: its message where it has one."""
    try:
        error: Any = json.loads(response.body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError, RecursionError):
        return _cut(response.body)


def _cut(body: bytes) -> str:
    return repr(body[:_SHOWN].decode(errors="replace"))


def _retry_after(response: Response) -> float | None:
    """Seconds that the server wants us to wait: it writes a number, or a date."""
    text = response.headers.get("retry-after", "").strip()
    if text.isdecimal() and text.isascii():
        return float(text[:9])
    try:
        at = parsedate_to_datetime(text)
    except (ValueError, OverflowError):  # a year of eleven digits
        return None
    at = at if at.tzinfo is not None else at.replace(tzinfo=UTC)
    return max(0.0, (at - datetime.now(UTC)).total_seconds())
