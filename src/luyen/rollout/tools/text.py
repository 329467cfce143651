"""Results as text: whatever a tool returned, of a length that a conversation can hold."""

import json
from typing import Any, Literal, TypeAlias

from pydantic_core import PydanticSerializationError, to_jsonable_python

Side: TypeAlias = Literal["left", "middle", "right"]
"""Which part of a long result is kept, named as verl names it; `middle` keeps both ends."""

MARK = "(truncated)"
_MOST_BYTES = 4_000_000
"""Of longer bytes only as many are decoded, at either end."""


def as_text(value: Any) -> str:
    """A string as it is, bytes decoded, anything else as JSON; TypeError when it has no JSON form.

    Example:
        >>> as_text({"found": [1, 2]}), as_text(b"ok"), as_text(None)
        ('{"found": [1, 2]}', 'ok', 'null')
    """
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray):
        return _decoded(bytes(value))
    try:
        plain = to_jsonable_python(value, inf_nan_mode="constants", bytes_mode="base64")
        return json.dumps(plain, ensure_ascii=False)
    except (PydanticSerializationError, ValueError, TypeError, RecursionError) as error:
        why = f"it returned a {type(value).__name__}, which is no text and has no JSON form"
        raise TypeError(why) from error


def _decoded(value: bytes) -> str:
    if len(value) > 2 * _MOST_BYTES:
        value = value[:_MOST_BYTES] + value[-_MOST_BYTES:]
    return value.decode("utf-8", errors="replace")


def shortened(text: str, *, most: int, side: Side) -> str:
    """At most so many characters of the text, with a mark where others stood.

    The text is cut before anything else looks at it, so its length costs nothing. Halves of
    surrogate pairs, which no tokenizer takes, are replaced.

    Example:
        >>> shortened("0123456789", most=4, side="middle")
        '01...(truncated)...89'
        >>> shortened("0123456789", most=4, side="left")
        '0123...(truncated)'
    """
    if len(text) <= most:
        return _encodable(text)
    if side == "left":
        cut = f"{text[:most]}...{MARK}"
    elif side == "right":
        cut = f"{MARK}...{text[len(text) - most :]}"
    else:
        head = most - most // 2
        cut = f"{text[:head]}...{MARK}...{text[len(text) - most // 2 :]}"
    return _encodable(cut)


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
