"""The tool protocol: schema, limits, markers, a session per rollout, and replies as text."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any, Literal, Protocol, TypeAlias, cast, final

from pydantic_core import PydanticSerializationError, to_jsonable_python

from luyen.base.errors import UserError, did_you_mean
from luyen.base.records import Prompt
from luyen.base.registry import Registry


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """Timeout, retries and concurrency of a tool.

    Example:
        >>> ToolLimits(timeout_s=5.0).retries
        0
    """

    timeout_s: float = 30.0
    """Most seconds of one attempt."""
    retries: int = 0
    """Further attempts after one that failed or timed out."""
    backoff_s: float = 0.5
    """Wait before the first retry; it doubles with each."""
    concurrency: int = 64
    """Most calls of this tool that run at once, over all rollouts."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReply:
    """Result of a tool call.

    Example:
        >>> ToolReply(text="42").reward is None
        True
    """

    text: str
    """Text for the policy."""
    reward: float | None = None
    """Reward of the call; None: the tool gives none."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers to log, by name."""


class ToolSession(Protocol):
    """A tool for the length of one rollout. State lives here and is never shared."""

    async def call(self, arguments: Mapping[str, Any]) -> ToolReply:
        """Run the tool; whatever it raises is reported to the policy."""
        ...

    async def score(self) -> float | None:
        """Reward of the whole rollout, at its end; None: the tool gives none."""
        ...

    async def release(self) -> None:
        """Release its resources; called exactly once, also after a fault."""
        ...


class Tool(Protocol):
    """A tool of the run."""

    @property
    def name(self) -> str:
        """Name that the policy calls it by."""
        ...

    @property
    def schema(self) -> Mapping[str, Any]:
        """`{"type": "function", "function": {"name", "description", "parameters"}}`."""
        ...

    @property
    def limits(self) -> ToolLimits:
        """Timeout, retries and concurrency."""
        ...

    async def open(self, prompt: Prompt, key: int) -> ToolSession:
        """A session for one rollout of a prompt.

        `key` seeds what is random in it; the samples of a group have the same one.
        """
        ...

    async def close(self) -> None:
        """Free what the run holds: servers, processes."""
        ...


# Optional marker classes for tools and sessions.


class SharedSession:
    """Mark of a tool with one session for all rollouts: it holds nothing and scores nothing.

    Such a session is neither opened nor scored nor released, all of which can take time.
    """

    session: ToolSession


class Stateful:
    """Mark of a session whose calls depend on earlier ones: they share its state.

    The state dies with the process, so a resumed rollout makes the calls again.
    """


class UsesRunLimits:
    """Mark of a tool without its own timeout: the run's timeout applies."""


class OneAtATime(Stateful):
    """Mark of a session whose calls must not overlap, since they share its state."""


class OwnTimeout:
    """Mark of a session that keeps the time of a call itself, and raises `ToolTimeout`.

    It is for calls that wait for a process first: the wait must not count.
    """


class ToolTimeout(Exception):
    """A call took longer than the limit of its tool."""


# Validation of the limits that users write.

_NAMES = tuple(field.name for field in fields(ToolLimits))
_WHOLE = ("retries", "concurrency")
_MAY_BE_ZERO = ("retries", "backoff_s")


def check_limits(limits: Mapping[str, Any]) -> None:
    """Raise a UserError unless every entry is a field of `ToolLimits` with a value that it takes.

    Example:
        >>> check_limits({"timeout_s": 5, "retries": 0})
        >>> check_limits({"retires": 5})
        Traceback (most recent call last):
        ...
        luyen.base.errors.UserError: limits = 'retires': no such limit. Fix: did you mean `retries`?
    """
    for name, value in limits.items():
        if name not in _NAMES:
            raise UserError("limits", name, "no such limit", did_you_mean(name, _NAMES))
        kind = int if name in _WHOLE else int | float
        least = "0 or more" if name in _MAY_BE_ZERO else "above 0"
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if not is_number or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
            what = "a whole number" if name in _WHOLE else "a number"
            raise UserError(f"limits.{name}", value, f"expected {what}", f"set it {least}")


builtin_tools: Registry[Callable[..., Tool]] = Registry("built-in tool", "tools[].builtin")
"""Factories of built-in tools by name; keyword arguments come from the entry's `config`."""


# Tool results as text of a limited length.

Side: TypeAlias = Literal["left", "middle", "right"]
"""Which part of a long result is kept, named as verl names it; `middle` keeps both ends."""

TRUNCATION_MARK = "(truncated)"
_MOST_ITEMS = 100_000
"""Items that are taken of an iterator, which may have no end."""
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
        plain = to_jsonable_python(_finite(value), inf_nan_mode="constants", bytes_mode="base64")
        return json.dumps(plain, ensure_ascii=False)
    except (PydanticSerializationError, ValueError, TypeError, RecursionError) as error:
        why = f"it returned a {type(value).__name__}, which is no text and has no JSON form"
        raise TypeError(why) from error


def _finite(value: Any) -> Any:
    """The value with iterators as lists; a ValueError for one that gives too many items."""
    if isinstance(value, Iterator):
        given = cast(Iterator[Any], value)
        items = [*islice(given, _MOST_ITEMS + 1)]
        if len(items) > _MOST_ITEMS:
            raise ValueError(f"it gives more than {_MOST_ITEMS} items")
        return [_finite(one) for one in items]
    if type(value) in (list, tuple):
        return [_finite(one) for one in cast(list[Any], value)]
    if type(value) is dict:
        return {key: _finite(one) for key, one in cast(dict[Any, Any], value).items()}
    return value


def _decoded(value: bytes) -> str:
    if len(value) > 2 * _MOST_BYTES:
        value = value[:_MOST_BYTES] + value[-_MOST_BYTES:]
    return value.decode("utf-8", errors="replace")


def truncate_text(text: str, *, most: int, side: Side) -> str:
    """At most so many characters of the text, with a mark where text was removed.

    The text is cut before anything else looks at it, so its length costs nothing. Halves of
    surrogate pairs, which no tokenizer takes, are replaced.

    Example:
        >>> truncate_text("0123456789", most=4, side="middle")
        '01...(truncated)...89'
        >>> truncate_text("0123456789", most=4, side="left")
        '0123...(truncated)'
    """
    if len(text) <= most:
        return _encodable(text)
    if side == "left":
        cut = f"{text[:most]}...{TRUNCATION_MARK}"
    elif side == "right":
        cut = f"{TRUNCATION_MARK}...{text[len(text) - most :]}"
    else:
        head = most - most // 2
        cut = f"{text[:head]}...{TRUNCATION_MARK}...{text[len(text) - most // 2 :]}"
    return _encodable(cut)


def _encodable(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def reply_of(returned: Any) -> ToolReply:
    """The return value of a function as a reply.

    Example:
        >>> reply_of([1, 2]).text
        '[1, 2]'
    """
    if isinstance(returned, ToolReply):
        return returned
    return ToolReply(text=as_text(returned))
