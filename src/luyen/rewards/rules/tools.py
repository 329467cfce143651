"""Rules about tool calls: valid, successful, needed, cheap, and none that is forbidden.

Every amount belongs to the turn that wrote the call. Shares lie between 0 and 1; penalties are
negative or zero, so doing nothing escapes them: combine them with an outcome reward.
"""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import fsum
from typing import Any, TypeAlias, cast, final
from urllib.parse import unquote

from luyen.base.records import CallStatus, Prompt, Rollout, Score, ToolCall
from luyen.base.secrets import KEY_SHAPES
from luyen.rewards.rules.rule import Unscorable, rule_rewards

# Scores made of per-turn amounts.


def by_turns(name: str, amounts: Iterable[tuple[int, float]], *, over: float = 1.0) -> Score:
    """The sum of all amounts, and the share of each turn in it, both divided by `over`.

    Example:
        >>> by_turns("hits", [(0, 1.0), (2, 1.0), (2, 1.0)], over=4.0).by_turn
        ((0, 0.25), (2, 0.5))
    """
    turns: dict[int, list[float]] = {}
    for turn, amount in amounts:
        turns.setdefault(turn, []).append(amount)
    shares = tuple((turn, fsum(turns[turn]) / over) for turn in sorted(turns))
    value = fsum(amount for some in turns.values() for amount in some) / over
    return Score(name=name, value=value, by_turn=shares)


def joined(name: str, parts: tuple[Score, ...]) -> Score:
    """The sum of scores that stay visible below it; their turns are theirs."""
    return Score(name=name, value=fsum(part.value or 0.0 for part in parts), parts=parts)


_SETTLED = (CallStatus.OK, CallStatus.UNKNOWN_TOOL, CallStatus.INVALID_ARGUMENTS)
"""After these the same call brings nothing new; what failed or was refused may be tried again."""


@rule_rewards.register("tool_valid", sees="rollout")
def tool_valid(
    prompt: Prompt,  # noqa: ARG001
    rollout: Rollout,
    *,
    without: float = 0.0,
) -> Score:
    """Share of the calls that name a tool on offer with arguments that fit; `without` any call."""
    return _share("tool_valid", rollout.calls, [c for c in rollout.calls if c.is_valid], without)


@rule_rewards.register("tool_success", sees="rollout")
def tool_success(
    prompt: Prompt,  # noqa: ARG001
    rollout: Rollout,
    *,
    without: float = 0.0,
) -> Score:
    """Share of the calls that ran and ended well; `without` any call that ran."""
    ran = [call for call in rollout.calls if call.has_run]
    return _share("tool_success", ran, [c for c in ran if c.status == CallStatus.OK], without)


def _share(name: str, calls: Sequence[ToolCall], good: Sequence[ToolCall], without: float) -> Score:
    if not calls:
        return Score(name=name, value=without)
    return by_turns(name, [(call.turn, 1.0) for call in good], over=len(calls))


@rule_rewards.register("tool_needless", sees="rollout")
def tool_needless(
    prompt: Prompt,  # noqa: ARG001
    rollout: Rollout,
    *,
    allowed: int | None = None,
) -> Score:
    """-1 for each call that repeats a settled one, and for each other call beyond `allowed`."""
    repeated = list(_repeated(rollout.calls))
    distinct = [c for c, again in zip(rollout.calls, repeated, strict=True) if not again]
    twice = [c for c, again in zip(rollout.calls, repeated, strict=True) if again]
    beyond = [] if allowed is None else distinct[allowed:]
    return joined(
        "tool_needless",
        (
            by_turns("repeated", [(call.turn, -1.0) for call in twice]),
            by_turns("beyond", [(call.turn, -1.0) for call in beyond]),
        ),
    )


def _repeated(calls: Sequence[ToolCall]) -> Iterator[bool]:
    """For each call, whether the same name and arguments were settled before."""
    settled: set[tuple[str, str]] = set()
    for call in calls:
        arguments = json.dumps(dict(call.arguments), sort_keys=True, default=repr)
        yield (call.name, arguments) in settled
        if call.status in _SETTLED:
            settled.add((call.name, arguments))


@rule_rewards.register("tool_cost", sees="rollout")
def tool_cost(
    prompt: Prompt,  # noqa: ARG001
    rollout: Rollout,
    *,
    per_call: float = 1.0,
    per_second: float = 0.0,
    per_character: float = 0.0,
    prices: Mapping[str, float] | None = None,
) -> Score:
    """Minus what calls that ran cost, their seconds, and every character read from any call.

    `prices` give a price per call by tool, in place of `per_call`. Seconds come from a clock, so
    with `per_second` a run does not repeat exactly.
    """
    by_tool = prices or {}
    ran = [call for call in rollout.calls if call.has_run]
    calls = [(call.turn, -by_tool.get(call.name, per_call)) for call in ran]
    seconds = [(call.turn, -per_second * call.seconds) for call in ran]
    read = [(call.turn, -per_character * len(call.result)) for call in rollout.calls]
    parts = (by_turns("calls", calls), by_turns("seconds", seconds), by_turns("characters", read))
    return joined("tool_cost", parts)


@rule_rewards.register("given", sees="rollout")
def collected_rewards(
    prompt: Prompt,  # noqa: ARG001
    rollout: Rollout,
    *,
    without: float = 0.0,
) -> Score:
    """The sum of what tools and environments gave on the way; `without` anything given."""
    if not rollout.given:
        return Score(name="given", value=without)
    if not all(math.isfinite(value) for _, value in rollout.given):
        raise Unscorable(f"a tool or environment gave a reward that is not finite: {rollout.given}")
    return by_turns("given", rollout.given)


# Forbidden calls: tools and arguments that must not be used, and data exfiltration.
#
# What counts is that the policy wrote it, whether or not the call ran. Patterns of the user
# meet text of the policy, so the rule runs isolated: one that backtracks for ever times out.

_QUERY = re.compile(r"\b(?:https?|wss?|ftp)://[^\s?#]{1,2000}+[?#]([^\s\"'<>)\]]*)", re.IGNORECASE)


Patterns: TypeAlias = str | Sequence[str]
"""Regular expressions, searched for."""
Leak: TypeAlias = Callable[[str], bool]
"""Whether a text holds what must not leave."""


@rule_rewards.register(
    "tool_safety", sees="rollout", isolated=True, wrong=-1.0, wrong_per_call=-3.0
)
def tool_safety(
    prompt: Prompt,  # noqa: ARG001
    rollout: Rollout,
    *,
    forbidden_tools: Sequence[str] = (),
    forbidden_arguments: Mapping[str, Patterns | Mapping[str, Patterns]] | None = None,
    secrets: bool = True,
    longest_query: int | None = 128,
    canaries: Sequence[str] = (),
) -> Score:
    """-1 for each call in each part that it offends, and -1 when the last message leaks.

    `forbidden_tools` are names, with `*` for anything. `forbidden_arguments` maps tools, and below
    them arguments, to expressions that no text in them may match; right below a tool they hold for
    all its arguments. What leaks is a URL whose query or fragment is longer than `longest_query`, a
    secret, or one of the `canaries`.
    """
    bans = list(_bans(forbidden_arguments or {}))
    leak = _leak(secrets=secrets, longest_query=longest_query, canaries=canaries)
    calls = rollout.calls
    tools = [c for c in calls if any(fnmatchcase(c.name, name) for name in forbidden_tools)]
    arguments = [c for c in calls if any(ban.is_broken_by(c) for ban in bans)]
    leaking = [c for c in calls if any(map(leak, _texts(c.arguments)))]
    out = _hits("exfiltration", leaking)
    if leak(rollout.text):
        # What was said last has no share of a turn: it stands where the rollout ends.
        out = Score(name=out.name, value=-1.0 - len(leaking), by_turn=out.by_turn)
    parts = (_hits("forbidden_tool", tools), _hits("forbidden_argument", arguments), out)
    return joined("tool_safety", parts)


def _hits(name: str, calls: Sequence[ToolCall]) -> Score:
    return by_turns(name, [(call.turn, -1.0) for call in calls])


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Ban:
    """Expressions that an argument of a tool must not match.

    Example:
        >>> from luyen.base.records import CallStatus
        >>> ban = _Ban(tool="sh*", argument="*", patterns=(re.compile("rm"),))
        >>> call = ToolCall(turn=0, name="shell", arguments={"run": ["rm", "-r"]},
        ...                 status=CallStatus.OK, result="")
        >>> ban.is_broken_by(call)
        True
    """

    tool: str
    """Name, with `*` for anything."""
    argument: str
    """Name, with `*` for anything."""
    patterns: tuple[re.Pattern[str], ...]
    """Searched for in every text inside the argument."""

    def is_broken_by(self, call: ToolCall) -> bool:
        """Whether some text of the call matches."""
        return fnmatchcase(call.name, self.tool) and any(
            pattern.search(text)
            for name, value in call.arguments.items()
            if fnmatchcase(name, self.argument)
            for text in _texts(value)
            for pattern in self.patterns
        )


def _bans(forbidden: Mapping[str, Patterns | Mapping[str, Patterns]]) -> Iterator[_Ban]:
    for tool, below in forbidden.items():
        arguments = below if isinstance(below, Mapping) else {"*": below}
        for argument, patterns in arguments.items():
            many = [patterns] if isinstance(patterns, str) else patterns
            try:
                compiled = tuple(re.compile(one, re.DOTALL) for one in many)
            except re.error as error:
                why = f"forbidden_arguments: {patterns!r} is no regular expression: {error}"
                raise Unscorable(why) from error
            yield _Ban(tool=tool, argument=argument, patterns=compiled)


def _texts(value: Any) -> Iterator[str]:
    """Every name and every plain value inside an argument, as text, however deep it is nested."""
    waiting = [value]
    while waiting:
        here = waiting.pop()
        if isinstance(here, Mapping):
            inner = cast(Mapping[Any, Any], here)
            waiting += [*inner.keys(), *inner.values()]
        elif isinstance(here, list | tuple):
            waiting += cast(list[Any], here)
        else:
            yield str(here)


def _leak(*, secrets: bool, longest_query: int | None, canaries: Sequence[str]) -> Leak:
    marks = [canary.casefold() for canary in canaries if canary]

    def leak(text: str) -> bool:
        if secrets and KEY_SHAPES.search(text):
            return True
        if longest_query is not None and any(
            len(found[1]) > longest_query for found in _QUERY.finditer(text)
        ):
            return True
        plain = [form.casefold() for form in (text, unquote(text))] if marks else []
        return any(mark in form for mark in marks for form in plain)

    return leak
