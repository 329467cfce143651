"""What a parser of tool calls takes and gives."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, final

from luyen.base.registry import Registry


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCall:
    """A call as the policy wrote it.

    Example:
        >>> WrittenCall(name="calculator", arguments={"expression": "6*7"}).name
        'calculator'
    """

    name: str
    """The tool's name; whether it exists is not looked at here."""
    arguments: Mapping[str, Any]
    """Named arguments; whether they fit is not looked at here."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Parsed:
    """What an assistant turn says, apart from its calls.

    Example:
        >>> Parsed(content="Let me see.", calls=()).problems
        ()
    """

    content: str
    """The text without the calls; thinking is kept."""
    calls: tuple[WrittenCall, ...]
    """Calls that could be read, in the order they stand."""
    problems: tuple[str, ...] = ()
    """One line for each attempt at a call that could not be read: what is wrong with it."""


ToolParser: TypeAlias = Callable[[str], Parsed]
"""Text of an assistant turn, special tokens spelled out and its end token left off -> calls.

It is total: any text gives a result, no text raises.
"""

tool_parsers: Registry[ToolParser] = Registry(
    "tool call format", "actor_rollout_ref.rollout.multi_turn.format"
)
"""Registered with `stop_tokens`: special tokens that end a turn besides the tokenizer's own."""
