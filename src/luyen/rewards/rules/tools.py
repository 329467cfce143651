"""How well tools were used: calls that are valid, that succeed, that are needed, that are cheap.

Every amount belongs to the turn that wrote the call. Shares lie between 0 and 1; penalties are
negative or zero, so doing nothing escapes them: they stand beside a reward for the outcome.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence

from luyen.base.calls import CallStatus, ToolCall
from luyen.base.records import Prompt, Rollout, Score
from luyen.rewards.outcome import Unscorable
from luyen.rewards.rules.rule import rule_rewards
from luyen.rewards.rules.turn_shares import by_turns, joined

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
    others = [c for c, again in zip(rollout.calls, repeated, strict=True) if not again]
    twice = [c for c, again in zip(rollout.calls, repeated, strict=True) if again]
    beyond = [] if allowed is None else others[allowed:]
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
def given(
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
