"""Finding calls between plain text and thinking: what the tagged formats share."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from luyen.rollout.parsers.call_objects import Attempt
from luyen.rollout.parsers.protocol import Parsed, WrittenCall

THINK, UNTHINK = "<think>", "</think>"
"""How most families wrap thinking, as patterns."""
ATTEMPT_LIMIT = 128
"""Attempts of one turn that are read. A policy that writes nothing but opening tags must neither
stop the other conversations nor fill its own with messages."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What stands at a mark.

    Example:
        >>> Piece(end=12, attempts=("the call is not closed",)).has_call
        False
    """

    end: int
    """Where the text goes on."""
    attempts: tuple[Attempt, ...] = ()
    """Calls and problems, in order; empty when nobody tried to call."""

    @property
    def has_call(self) -> bool:
        """Whether any of it could be read."""
        return any(isinstance(attempt, WrittenCall) for attempt in self.attempts)


Read: TypeAlias = Callable[[str, re.Match[str]], Piece]
"""(text, mark that was found) -> what stands there; it must not raise."""


def marks(opening: str, think: str = THINK, unthink: str = UNTHINK) -> re.Pattern[str]:
    """A pattern of everything at which `scan` stops; `opening` must not match empty text."""
    return re.compile(f"(?P<call>{opening})|(?P<think>{think})|(?P<unthink>{unthink})")


def scan(text: str, at_marks: re.Pattern[str], read: Read) -> Parsed:
    """Calls and problems in the order they stand, and the text around the calls.

    What stands in a thinking block is no call; a block that is not closed reaches to the end. When
    the first mark of thinking is a closing one, the prompt opened the block, and everything before
    it is thinking.

    A text without calls is the content, unchanged. Otherwise the calls are cut out together with
    the blanks around them. Attempts that could not be read stay in the content.
    """
    attempts: list[Attempt] = []
    kept: list[str] = []
    at = start = 0
    thought = False
    while (mark := at_marks.search(text, at)) is not None:
        at = mark.end()
        if mark.lastgroup == "think":
            thought, at = True, _end_of_thinking(text, at, at_marks)
        elif mark.lastgroup == "unthink":
            if not thought:
                attempts, kept, start = [], [], 0
            thought = True
        elif len(attempts) <= ATTEMPT_LIMIT:
            piece = read(text, mark)
            attempts += piece.attempts
            at = max(at, piece.end)
            if piece.has_call:
                kept.append(text[start : mark.start()])
                start = at
    return gathered(_joined([*kept, text[start:]]), attempts)


def gathered(content: str, attempts: Sequence[Attempt]) -> Parsed:
    """Content and attempts as a result; past `ATTEMPT_LIMIT`, one problem stands for the rest."""
    first: list[Attempt] = [*attempts[:ATTEMPT_LIMIT]]
    if len(attempts) > ATTEMPT_LIMIT:
        first.append(f"only the first {ATTEMPT_LIMIT} calls of a turn are read")
    return Parsed(
        content=content,
        calls=tuple(a for a in first if isinstance(a, WrittenCall)),
        problems=tuple(a for a in first if isinstance(a, str)),
    )


def behind_failure(text: str, at: int, stops: re.Pattern[str]) -> int:
    """Where to go on after an attempt failed at a position.

    That is behind the next match of the group `close` of `stops`, or before any other match.
    """
    stop = stops.search(text, at)
    if stop is None:
        return len(text)
    return stop.end() if stop.lastgroup == "close" else stop.start()


def _end_of_thinking(text: str, at: int, at_marks: re.Pattern[str]) -> int:
    while (mark := at_marks.search(text, at)) is not None:
        if mark.lastgroup == "unthink":
            return mark.end()
        at = mark.end()
    return len(text)


def _joined(pieces: list[str]) -> str:
    """The pieces between calls, without the blanks that touch a call."""
    if len(pieces) == 1:
        return pieces[0]
    inner = (piece.strip() for piece in pieces[1:-1])
    trimmed = (pieces[0].rstrip(), *inner, pieces[-1].lstrip())
    return "\n".join(piece for piece in trimmed if piece)
