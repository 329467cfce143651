"""The tool call parser protocol, and the scanning and JSON reading that formats share."""

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast, final

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
    """The tool's name; the parser does not check that it exists."""
    arguments: Mapping[str, Any]
    """Named arguments; the parser does not validate them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedTurn:
    """An assistant turn, split into text and calls.

    Example:
        >>> ParsedTurn(content="Let me see.", calls=()).problems
        ()
    """

    content: str
    """The text without the calls; thinking is kept."""
    calls: tuple[WrittenCall, ...]
    """Well-formed calls, in text order."""
    problems: tuple[str, ...] = ()
    """One line for each malformed call: what is wrong with it."""


ToolParser: TypeAlias = Callable[[str], ParsedTurn]
"""Text of an assistant turn, special tokens spelled out and its end token left off -> calls.

It is total: any text gives a result, no text raises.
"""

tool_parsers: Registry[ToolParser] = Registry(
    "tool call format", "actor_rollout_ref.rollout.multi_turn.format"
)
"""Registered with `stop_tokens`: more special tokens that end a turn."""


# Strict JSON reading from a position in the text, with a reason on failure.

NESTING_LIMIT = 64
"""Deeper values are refused: what handles them later may recurse, and no tool needs them."""

_BLANK = re.compile(r"[ \t\n\r]*")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_EXCERPT = 24


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JsonRead:
    """Result of reading JSON at a position.

    Example:
        >>> JsonRead(value=1, end=3).fault is None
        True
    """

    value: Any
    """The value; means nothing when there is a fault."""
    end: int
    """The position behind the value, or where reading failed."""
    fault: str | None = None
    """Why it is not usable JSON, in one line; None when it is."""


def quoted(text: str, most: int = 60) -> str:
    """Text for a message: in quotes, on one line, shortened, nothing but ASCII.

    Example:
        >>> quoted("a\\nb")
        '"a\\\\nb"'
    """
    return json.dumps(text if len(text) <= most else text[:most] + "...")


def read_json(text: str, at: int) -> JsonRead:
    """The JSON value that begins at a position, blanks before it allowed. Never raises.

    NaN, Infinity, a key that stands twice in an object, numbers that do not fit, half of a
    surrogate pair, and values nested beyond `NESTING_LIMIT` are faults. Their end is known all
    the same, so tags inside their strings are not taken for the end of a call.

    Example:
        >>> read_json('see {"a": "}"} there', 4)
        JsonRead(value={'a': '}'}, end=14, fault=None)
        >>> read_json('{"a": NaN}', 0).fault
        'NaN is not JSON'
    """
    start = _skip_blanks(text, at)
    faults: list[str] = []
    try:
        value, end = _decoder(faults).raw_decode(text, start)
    except json.JSONDecodeError as error:
        return JsonRead(value=None, end=max(error.pos, start), fault=_reason(error, start))
    except RecursionError:
        return JsonRead(value=None, end=start, fault=_too_deep())
    fault = faults[0] if faults else flaw(value)
    return JsonRead(value=value, end=end, fault=fault)


def flaw(value: Any) -> str | None:
    """Why a decoded value is not usable; None when it is."""
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if depth > NESTING_LIMIT:
            return _too_deep()
        if isinstance(item, str) and _HALF_CHARACTER.search(item):
            return "a string holds half of a surrogate pair"
        if isinstance(item, float) and not math.isfinite(item):
            return "a number is too large"
        if isinstance(item, dict):
            waiting += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list):
            waiting += [(part, depth + 1) for part in item]
    return None


def _skip_blanks(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    return blank.end() if blank else at


def _too_deep() -> str:
    return f"it is nested more than {NESTING_LIMIT} levels deep"


def _reason(error: json.JSONDecodeError, start: int) -> str:
    if error.pos >= len(error.doc):
        return f"{error.msg}, but the text ends there"
    near = quoted(error.doc[error.pos : error.pos + _EXCERPT])
    return f"{error.msg} at character {max(error.pos - start, 0)}, near {near}"


def _decoder(faults: list[str]) -> json.JSONDecoder:
    """A decoder that reads on past what it must refuse and notes it in `faults`."""

    def constant(name: str) -> None:
        faults.append(f"{name} is not JSON")

    def integer(digits: str) -> int:
        try:
            return int(digits)
        except ValueError:
            faults.append(f"a number has {len(digits)} digits, which is too long")
            return 0

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) < len(items):
            twice = next(name for name, times in Counter(n for n, _ in items).items() if times > 1)
            faults.append(f"the key {quoted(twice)} stands twice in one object")
        return made

    return json.JSONDecoder(parse_constant=constant, parse_int=integer, object_pairs_hook=pairs)


# Decoded JSON to a call, or to one line that says why it is not a call.

Attempt: TypeAlias = WrittenCall | str
"""A call, or what is wrong with it."""

_CALL_FIELDS = frozenset(("name", "id", "type"))


def call_from_object(value: Any, keys: tuple[str, ...] = ("arguments",)) -> Attempt:
    """A call from `{"name": ..., "arguments": {...}}`; `keys` may hold the arguments.

    An object with a name and nothing else calls without arguments.

    Example:
        >>> call_from_object({"name": "now"}).arguments
        {}
        >>> call_from_object({"name": "f", "args": {"x": 1}})
        'the call of "f" has no "arguments"; it has "args"'
    """
    if not isinstance(value, dict):
        return f"the call must be a JSON object, not {_kind(value)}"
    fields = cast(dict[str, Any], value)
    if "name" not in fields:
        return 'the call has no "name"'
    name: Any = fields["name"]
    if not isinstance(name, str) or not name:
        return 'the "name" of the call must be a string that is not empty'
    present = [key for key in keys if key in fields]
    if len(present) > 1:
        return f"the call of {quoted(name)} has {_listed(present)}, and only one can count"
    if present:
        return call_from_parts(name, fields[present[0]])
    unexpected = [key for key in fields if key not in _CALL_FIELDS]
    if unexpected:
        return f'the call of {quoted(name)} has no "{keys[0]}"; it has {_listed(unexpected[:4])}'
    return WrittenCall(name=name, arguments={})


def call_from_parts(name: str, arguments: Any) -> Attempt:
    """A call from its name and decoded arguments; arguments in a JSON string are decoded.

    Example:
        >>> call_from_parts("f", '{"x": 1}').arguments
        {'x': 1}
        >>> call_from_parts("f", [1])
        'the arguments of "f" must be a JSON object, not a list'
    """
    if not name:
        return "the call has no name"
    if isinstance(arguments, str):
        inner = read_json(arguments, 0)
        rest = arguments[inner.end :].strip()
        if inner.fault is not None or rest:
            why = inner.fault or f"{quoted(rest)} follows the object"
            return f"the arguments of {quoted(name)} are a string that is not valid JSON: {why}"
        arguments = inner.value
    if not isinstance(arguments, dict):
        return f"the arguments of {quoted(name)} must be a JSON object, not {_kind(arguments)}"
    return WrittenCall(name=name, arguments=cast(Mapping[str, Any], arguments))


def _listed(names: list[str]) -> str:
    return " and ".join(quoted(name) for name in names)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    words = {str: "a string", int: "a number", float: "a number", list: "a list"}
    return words[type(value)]


# Scanning a turn for calls between text and thinking blocks; shared by the tagged formats.

THINK, UNTHINK = "<think>", "</think>"
"""Thinking tags of most model families, as patterns."""
ATTEMPT_LIMIT = 128
"""Attempts of one turn that are read. A policy that writes nothing but opening tags must neither
stop the other conversations nor fill its own with messages."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """Result of reading the text at a mark.

    Example:
        >>> Piece(end=12, attempts=("the call is not closed",)).has_call
        False
    """

    end: int
    """Position after it."""
    attempts: tuple[Attempt, ...] = ()
    """Calls and problems, in order; empty when there was no attempt to call."""

    @property
    def has_call(self) -> bool:
        """Whether any of it could be read."""
        return any(isinstance(attempt, WrittenCall) for attempt in self.attempts)


Read: TypeAlias = Callable[[str, re.Match[str]], Piece]
"""(text, mark that was found) -> the piece there; it must not raise."""


def marks(opening: str, think: str = THINK, unthink: str = UNTHINK) -> re.Pattern[str]:
    """A pattern of everything at which `scan` stops; `opening` must not match empty text."""
    return re.compile(f"(?P<call>{opening})|(?P<think>{think})|(?P<unthink>{unthink})")


def scan(text: str, at_marks: re.Pattern[str], read: Read) -> ParsedTurn:
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


def gathered(content: str, attempts: Sequence[Attempt]) -> ParsedTurn:
    """Content and attempts as a result; past `ATTEMPT_LIMIT`, one problem stands for the rest."""
    first: list[Attempt] = [*attempts[:ATTEMPT_LIMIT]]
    if len(attempts) > ATTEMPT_LIMIT:
        first.append(f"only the first {ATTEMPT_LIMIT} calls of a turn are read")
    return ParsedTurn(
        content=content,
        calls=tuple(a for a in first if isinstance(a, WrittenCall)),
        problems=tuple(a for a in first if isinstance(a, str)),
    )


def behind_failure(text: str, at: int, stops: re.Pattern[str]) -> int:
    """Position at which to continue after a malformed call.

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
