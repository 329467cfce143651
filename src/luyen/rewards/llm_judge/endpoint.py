"""An OpenAI-compatible endpoint: messages go in, the text of the reply comes out."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast, final

from luyen.base.api_endpoint import SHOWN, ApiEndpoint, error_message, quoted_body, retry_after_s
from luyen.base.http import HttpError
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


@final
class Endpoint:
    """One model of one server; a call sends one request. The caller waits and retries."""

    def __init__(self, base_url: str, *, api_key_env: str | None) -> None:
        """A UserError when the environment does not hold the key."""
        key = None if api_key_env is None else judge_api_key(api_key_env)
        self._api = ApiEndpoint(base_url, key=key)

    async def __call__(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> str:
        """The text of the reply; a JudgeFault when there is none. Neither holds the key."""
        payload = {"messages": [dict(message) for message in messages], **settings}
        api = self._api
        try:
            response = await api.request(
                "POST", "/chat/completions", payload, most_bytes=MOST_BYTES
            )
        except HttpError as error:
            kind = TOO_LONG if error.kind == "too_long" else CONNECTION
            raise JudgeFault(kind, str(error)) from error
        if response.status != 200:
            kind, said = f"http_{response.status}", api.hidden(error_message(response))
            raise JudgeFault(kind, said[:SHOWN], retry_after_s=retry_after_s(response))
        return api.hidden(reply_in(response.body))


def reply_in(body: bytes) -> str:
    """The text of the first choice of a chat completion, if it was said to its end.

    Example:
        >>> reply_in(b'{"choices": [{"message": {"content": "Score: 7"}}]}')
        'Score: 7'
    """
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise JudgeFault(NOT_JSON, f"the body is {quoted_body(body)}") from error
    try:
        choice = found["choices"][0]
        text = choice["message"].get("content")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise JudgeFault(SHAPE, f"no choices[0].message in {quoted_body(body)}") from error
    if cast(dict[str, Any], choice).get("finish_reason") == "length":
        raise JudgeFault(CUT_OFF, f"max_tokens ended the reply: {quoted_end(str(text or ''))}")
    if text is not None and not isinstance(text, str):
        raise JudgeFault(SHAPE, f"the content is no text in {quoted_body(body)}")
    if not text or not text.strip():
        raise JudgeFault(EMPTY, "the reply is empty")
    return text
