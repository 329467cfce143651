"""What foreign worlds hand over, checked: a wrong type is a fault with a line that says whose."""

import math
from collections.abc import Sequence
from typing import Any

from luyen.base.records import Message


def text_or_none(value: Any, who: str) -> str | None:
    """A text, or None; TypeError for anything else.

    Example:
        >>> text_or_none("Go on.", "Clerk.respond")
        'Go on.'
    """
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"{who} gave a {type(value).__name__}; it must give a text, or None")


def number_or_none(value: Any, who: str) -> float | None:
    """A finite number, or None; TypeError for anything else: what is no reward never reads as 0.

    Example:
        >>> number_or_none(1, "Clerk.get_reward")
        1.0
    """
    if value is None:
        return None
    # Numbers of numpy and torch are no `int` or `float`, but they know their value.
    if not isinstance(value, str | bytes) and "__float__" in dir(value):
        number = float(value)
        if math.isfinite(number):
            return number
    raise TypeError(f"{who} gave {str(value)[:80]!r}; a reward is a finite number, or None")


def with_text(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """The conversation with more said by the user: in the last message if that is theirs.

    Two messages of a user in a row are refused by many chat templates.

    Example:
        >>> with_text([{"role": "user", "content": "Play."}], "You see a door.")
        ({'role': 'user', 'content': 'Play.\\n\\nYou see a door.'},)
    """
    if messages and messages[-1]["role"] == "user" and isinstance(messages[-1]["content"], str):
        last = messages[-1]
        joined = "\n\n".join(part for part in (last["content"], text) if part)
        return *messages[:-1], {**last, "content": joined}
    return *messages, {"role": "user", "content": text}
