"""The score in a judge's reply. What is not clearly one is a fault; nothing is guessed."""

import json
import math
import re
from collections.abc import Mapping
from typing import Any, cast

from luyen.rewards.judge_faults import (
    CUT_OFF,
    NOT_FINITE,
    OUT_OF_RANGE,
    UNPARSABLE,
    JudgeFault,
    shown,
)
from luyen.rewards.judge_number import score_in
from luyen.rewards.outcome import Unscorable

_THINKING = re.compile(r"\A.*</think>", re.DOTALL)
_STILL_THINKING = re.compile(r"^[ \t]{0,20}<think>", re.MULTILINE)
_VERDICT = (
    r"(?:verdict|answer|choice|judge?ment|grade|rating|score)[*_]*(?:\s+is|\s*[:=])[\s*_\"'(\[]*"
)
_STARTS = 200
"""How many braces of a reply are tried as the beginning of JSON."""


def spoken(reply: str) -> str:
    """A reply without the thoughts before it; a fault when it ends among them.

    Example:
        >>> spoken("<think>7? 8?</think> Score: 8")
        'Score: 8'
    """
    said = _THINKING.sub("", reply).strip()
    if _STILL_THINKING.search(said):
        raise JudgeFault(CUT_OFF, f"the reply ends in its thoughts: {shown(said)}")
    return said


def number_in(reply: str, *, best: float | None = None) -> float:
    """The number that a reply gives as its score, as `luyen.rewards.judge_number` finds it.

    A total behind it (`7/10`, `7 out of 10`, `70%`) must be the best score.

    Example:
        >>> number_in("Clear, but 2 errors. Score: 7/10", best=10.0), number_in("[[3]] of 5 points")
        (7.0, 3.0)
    """
    text = spoken(reply)
    found = score_in(text)
    if found.total is not None and finite(found.total) != best:
        why = f"a part of {found.total} in {shown(text)}, where scale does not end"
        raise JudgeFault(UNPARSABLE, why)
    return finite(found.number)


def choice_in(reply: str, choices: Mapping[str, float]) -> float:
    """The score of the choice that a reply settles on.

    It stands in double brackets, or alone on the last line, or after `verdict:` and the like (best
    on a line of its own), or opens the reply before a punctuation mark. Two different ones in such
    a place, or `A or B`, are a fault. A single letter must have the case it is written in.

    Example:
        >>> choice_in("B repeats itself.\\nVerdict: **A**", {"A": 1.0, "B": 0.0})
        1.0
        >>> choice_in("Yes, it is.", {"yes": 1.0, "no": 0.0})
        1.0
    """
    text = spoken(reply)
    names = sorted(choices, key=len, reverse=True)
    forms = [re.escape(n) if len(n) == 1 else f"(?i:{re.escape(n)})" for n in names]
    any_of = rf"(?:{'|'.join(forms)})(?!\w)"
    one = rf"({any_of})(?!\W{{0,6}}(?:\bor\b|[/|])\W{{0,6}}{any_of})"
    last = text.rpartition("\n")[2].strip(" \t*_.\"'()[]`")
    places = (
        re.findall(rf"\[\[\s*{one}\s*\]\]", text),
        re.findall(rf"\A{one}\Z", last),
        re.findall(rf"(?m)^[ \t*_#>\-]{{0,20}}(?i:{_VERDICT}){one}[*_.!\"')\] \t]*$", text),
        re.findall(rf"(?i:{_VERDICT}){one}", text),
        re.findall(rf"\A[\s*_\"'(\[]*{one}(?=[*_\"')\]]*(?:[.,:;!\n]|\Z))", text),
    )
    found = next((some for some in places if some), [])
    scores = {_score_of(name, choices) for name in found}
    if len(scores) != 1:
        how = "several" if scores else "none"
        raise JudgeFault(UNPARSABLE, f"{how} of {', '.join(choices)} settled on in {shown(text)}")
    return scores.pop()


def _score_of(found: str, choices: Mapping[str, float]) -> float:
    exact = {n: s for n, s in choices.items() if n == found}
    alike = {n: s for n, s in choices.items() if n.casefold() == found.casefold()}
    return next(iter((exact or alike).values()))


def json_number_in(reply: str, json_key: str) -> float:
    """The number under a key of the last JSON object of a reply that has it; true is 1.

    Example:
        >>> json_number_in('Here: {"score": {"style": 0.5}}', "score.style")
        0.5
    """
    text = spoken(reply)
    for tree in _objects(text):
        found: Any = tree
        for name in json_key.split("."):
            found = cast(Any, found).get(name) if isinstance(found, Mapping) else None
        if isinstance(found, str | int | float):
            return finite(found)
    raise JudgeFault(UNPARSABLE, f"no JSON object with a number under {json_key} in {shown(text)}")


def _objects(text: str) -> list[Any]:
    """Every JSON object that a text holds and that lies in no other, the last one first."""
    decoder = json.JSONDecoder()
    found: list[Any] = []
    start = text.find("{")
    for _ in range(_STARTS):
        if start < 0:
            break
        try:
            tree, end = decoder.raw_decode(text, start)
            found.append(tree)
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)
    return found[::-1]


def pattern_number_in(text: str, pattern: str) -> float:
    """The first group of a pattern's last match; it runs isolated, since patterns can hang."""
    found = [match.group(1) for match in re.finditer(pattern, text)]
    if not found or found[-1] is None:
        raise Unscorable("no match")
    return float(found[-1])


def finite(value: str | float) -> float:
    """A number out of what stands where the score is."""
    try:
        number = float(value)
    except (ValueError, OverflowError) as error:
        raise JudgeFault(UNPARSABLE, f"{shown(str(value))} is no number") from error
    if not math.isfinite(number):
        raise JudgeFault(NOT_FINITE, f"the score is {number}")
    return number


def on_scale(number: float, scale: tuple[float, float] | None) -> float:
    """A number between worst and best as one between 0 and 1; as it is without a scale.

    Example:
        >>> on_scale(7.0, (0.0, 10.0)), on_scale(7.0, None)
        (0.7, 7.0)
    """
    if scale is None:
        return number
    worst, best = scale
    if not worst <= number <= best:
        raise JudgeFault(OUT_OF_RANGE, f"{number:g} does not lie between {worst:g} and {best:g}")
    return (number - worst) / (best - worst)
