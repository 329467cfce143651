"""The shape of an answer: a pattern it follows, JSON that parses."""

import json
import re
from collections.abc import Sequence
from typing import Any, Literal

from luyen.base.records import Prompt
from luyen.rewards.outcome import Unscorable
from luyen.rewards.rules.rule import Answer, rule_rewards

_FENCED = re.compile(r"\A\s*```(?:json)?[ \t]*\n(.*)\n[ \t]*```\s*\Z", re.DOTALL)


@rule_rewards.register("regex", isolated=True, deterministic=True, wrong=0.0)
def regex(
    prompt: Prompt,  # noqa: ARG001
    answer: Answer,
    *,
    pattern: str,
    match: Literal["full", "search"] = "full",
) -> float:
    """1 when the whole answer (or, with `search`, some part of it) follows the pattern.

    A dot matches line ends too. It runs isolated: a pattern that backtracks for ever times out.
    """
    try:
        compiled = re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise Unscorable(f"pattern {pattern!r} is no regular expression: {error}") from error
    found = compiled.fullmatch(answer.text) if match == "full" else compiled.search(answer.text)
    return float(found is not None)


@rule_rewards.register("json", wrong=0.0)
def json_valid(
    prompt: Prompt,  # noqa: ARG001
    answer: Answer,
    *,
    required: Sequence[str] = (),
    fenced: bool = True,
) -> float:
    """1 when the answer is JSON and holds every required key at its top; a fence is allowed."""
    try:
        value = parsed_json(answer.text, fenced=fenced)
    except (ValueError, RecursionError):
        return 0.0
    if not required:
        return 1.0
    return float(isinstance(value, dict) and all(name in value for name in required))


def parsed_json(text: str, *, fenced: bool = True) -> Any:
    """The value of a text that is JSON, in a fence if that is allowed; NaN and infinity are not."""
    fence = _FENCED.match(text) if fenced else None
    return json.loads(fence.group(1) if fence else text, parse_constant=_refuse)


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")
