"""Llama 3.1 and later: calls as JSON, or written like Python and read as literals.

A call is `{"name": ..., "parameters": {...}}`, behind `<|python_tag|>` or as the whole message;
several are parted by `;`. Llama 3.2 also writes `[f(x=1), g(y="a")]`, and the tools it knows from
its training are called as `<|python_tag|>name.call(query="...")`.

Without the tag, a message that is JSON may as well be an answer. It counts as a call when it is an
object with `parameters` or `arguments`, or breaks off after a key that calls begin with.
"""

import re
from dataclasses import dataclass
from typing import Any, cast, final

from luyen.rollout.parsers.protocol import (
    NESTING_LIMIT,
    Attempt,
    JsonRead,
    ParsedTurn,
    Piece,
    WrittenCall,
    behind_failure,
    call_from_object,
    flaw,
    marks,
    quoted,
    read_json,
    scan,
    tool_parsers,
)

# Calls written like Python: `f(x=1, y="a")`. Literals are read; nothing is evaluated.

_BLANK = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z_][\w.-]*")
_KEY = re.compile(r"([A-Za-z_]\w*)\s*=(?!=)")
_STRING = re.compile(r'"((?:[^"\\\n]|\\.)*)"' + r"|'((?:[^'\\\n]|\\.)*)'", re.DOTALL)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_WORD = re.compile(r"(?:True|False|None|true|false|null)\b")
_WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\", "'": "'", '"': '"', "\n": "", "0": "\0"}
_BUILT_IN = ".call"
"""Llama calls a tool it knows from its training as `name.call(...)`."""


class _NotACallError(ValueError):
    """The text is not a call; the message says why."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PythonicRead:
    """Result of reading calls at a position.

    Example:
        >>> PythonicRead(calls=(), end=3).fault is None
        True
    """

    calls: tuple[WrittenCall, ...]
    """The calls; none when there is a fault."""
    end: int
    """The position behind them, or where reading failed."""
    fault: str | None = None
    """Why they cannot be read, in one line."""


def read_pythonic(text: str, at: int) -> PythonicRead:
    """The call, or the list of calls in brackets, that begins at a position. Never raises.

    Example:
        >>> read_pythonic("[f(x=1), g(y=['a', None])]", 0).calls[1].arguments
        {'y': ['a', None]}
        >>> read_pythonic("f(1)", 0).fault
        'the arguments of "f" must be written as KEY=VALUE, near "1)"'
    """
    reader = _Reader(text, at)
    try:
        calls = reader.calls()
    except _NotACallError as error:
        near = text[reader.at : reader.at + 24]
        where = f"near {quoted(near)}" if near.strip() else "where the text ends"
        return PythonicRead(calls=(), end=reader.at, fault=f"{error}, {where}")
    return PythonicRead(calls=tuple(calls), end=reader.at)


@final
class _Reader:
    """A position in a text that moves on as things are read."""

    def __init__(self, text: str, at: int) -> None:
        self.text = text
        self.at = at
        self._skip()

    def calls(self) -> list[WrittenCall]:
        if not self._take("["):
            return [self._call()]
        calls = [self._call()]
        while self._take(","):
            calls.append(self._call())
        self._need("]", "the list of calls")
        return calls

    def _call(self) -> WrittenCall:
        name = self._match(_NAME)
        if name is None:
            raise _NotACallError("a call must begin with the name of a tool")
        called = name.group().removesuffix(_BUILT_IN)
        self._need("(", quoted(called))
        arguments: dict[str, Any] = {}
        while not self._take(")"):
            key = self._match(_KEY)
            if key is None:
                why = f"the arguments of {quoted(called)} must be written as KEY=VALUE"
                raise _NotACallError(why)
            if key.group(1) in arguments:
                raise _NotACallError(f"{quoted(key.group(1))} stands twice in {quoted(called)}")
            arguments[key.group(1)] = self._value(1)
            if not self._take(","):
                self._need(")", quoted(called))
                break
        wrong = flaw(arguments)
        if wrong is not None:
            raise _NotACallError(f"{quoted(called)} cannot be called: {wrong}")
        return WrittenCall(name=called, arguments=arguments)

    def _value(self, depth: int) -> Any:
        if depth > NESTING_LIMIT:
            raise _NotACallError(f"a value is nested more than {NESTING_LIMIT} levels deep")
        if (string := self._match(_STRING)) is not None:
            return _unescaped(string.group(1) if string.group(1) is not None else string.group(2))
        if (number := self._match(_NUMBER)) is not None:
            return _number(number.group())
        if (word := self._match(_WORD)) is not None:
            return _WORDS[word.group()]
        if self._take("["):
            return self._items(depth)
        if self._take("{"):
            return self._pairs(depth)
        raise _NotACallError("a value must be a string, number, True, False, None, list or dict")

    def _items(self, depth: int) -> list[Any]:
        items: list[Any] = []
        while not self._take("]"):
            items.append(self._value(depth + 1))
            if not self._take(","):
                self._need("]", "a list")
                break
        return items

    def _pairs(self, depth: int) -> dict[str, Any]:
        pairs: dict[str, Any] = {}
        while not self._take("}"):
            key = self._value(depth + 1)
            if not isinstance(key, str) or key in pairs:
                raise _NotACallError("the keys of a dict must be strings, each once")
            self._need(":", "a dict")
            pairs[key] = self._value(depth + 1)
            if not self._take(","):
                self._need("}", "a dict")
                break
        return pairs

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self.text, self.at)
        if found is not None:
            self.at = found.end()
            self._skip()
        return found

    def _take(self, sign: str) -> bool:
        if not self.text.startswith(sign, self.at):
            return False
        self.at += len(sign)
        self._skip()
        return True

    def _need(self, sign: str, of: str) -> None:
        if not self._take(sign):
            raise _NotACallError(f"{sign} is missing in {of}")

    def _skip(self) -> None:
        blank = _BLANK.match(self.text, self.at)
        self.at = blank.end() if blank else self.at


def _number(digits: str) -> int | float:
    try:
        return int(digits) if digits.lstrip("+-").isdecimal() else float(digits)
    except ValueError as error:
        raise _NotACallError(f"a number has {len(digits)} digits, which is too long") from error


def _unescaped(body: str) -> str:
    """A string without its escapes; an unknown escape stays as it is, as in Python."""

    def plain(escape: re.Match[str]) -> str:
        code = escape.group(1) or escape.group(2) or escape.group(3)
        if code is None:
            return _ESCAPES.get(escape.group(4), escape.group())
        number = int(code, 16)
        return chr(number) if number <= 0x10FFFF else escape.group()

    return _ESCAPE.sub(plain, body)


_TAG = "<|python_tag|>"
_MARKS = marks(r"<\|python_tag\|>|(?:\A|(?<=</think>))\s*[{\[]")
_STOPS = re.compile(r"<\|python_tag\|>|</?think>")
_CALL_KEYS = ("parameters", "arguments")
_BEGUN = re.compile(r'[\[\s]*\{\s*"(?:name|parameters|arguments|type|function)"\s*:')
_LISTED = re.compile(r"\s*\[\s*[A-Za-z_][\w.-]*\(")
_WRITTEN = re.compile(r"\s*[A-Za-z_][\w.-]*\(")
_JSON = re.compile(r"\s*[{\[]")
_NEXT = re.compile(r"[\s;]*(?=\{)")


@tool_parsers.register("llama3", stop_tokens=("<|eot_id|>", "<|eom_id|>"), values="json")
def parse_llama3(text: str) -> ParsedTurn:
    """Calls in the formats of Llama 3.

    Example:
        >>> parse_llama3('<|python_tag|>{"name": "f", "parameters": {"x": 1}}').calls[0].arguments
        {'x': 1}
        >>> parse_llama3("[f(x=1)]").calls[0].name
        'f'
        >>> parse_llama3('{"answer": 42}').calls
        ()
    """
    return scan(text, _MARKS, _read)


def _read(text: str, mark: re.Match[str]) -> Piece:
    tagged = mark.group() == _TAG
    at = mark.end() if tagged else mark.end() - 1
    if _LISTED.match(text, at) or (tagged and _WRITTEN.match(text, at)):
        return _pythonic(text, at)
    if not _JSON.match(text, at):
        return _failed(text, at, f"neither JSON nor a call follows {_TAG}")
    found = read_json(text, at)
    if not tagged and not _is_attempt(text, at, found):
        return Piece(end=mark.end())
    return _objects(text, found)


def _pythonic(text: str, at: int) -> Piece:
    found = read_pythonic(text, at)
    if found.fault is not None:
        return _failed(text, found.end, f"the call cannot be read: {found.fault}")
    return Piece(end=found.end, attempts=found.calls)


def _is_attempt(text: str, at: int, found: JsonRead) -> bool:
    """Whether JSON without the tag is meant as a call."""
    if found.fault is not None:
        return _BEGUN.match(text, at) is not None
    items = cast(list[Any], found.value if isinstance(found.value, list) else [found.value])
    return any(isinstance(item, dict) and any(key in item for key in _CALL_KEYS) for item in items)


def _objects(text: str, found: JsonRead) -> Piece:
    """The calls from a first JSON value on; a value that cannot be read is the last."""
    attempts: list[Attempt] = []
    end = found.end
    while found.fault is None:
        items = cast(list[Any], found.value if isinstance(found.value, list) else [found.value])
        attempts += [call_from_object(item, _CALL_KEYS) for item in items]
        further = _NEXT.match(text, found.end)
        if further is None:
            return Piece(end=found.end, attempts=tuple(attempts) or ("the list is empty",))
        end, found = found.end, read_json(text, further.end())
    attempts.append(f"the call is not valid JSON: {found.fault}")
    # What was read is cut out of the content; what could not be read must stay in it.
    return Piece(end=end, attempts=tuple(attempts))


def _failed(text: str, at: int, why: str) -> Piece:
    return Piece(end=behind_failure(text, at, _STOPS), attempts=(why,))
