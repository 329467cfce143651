"""Where a score stands in the words of a judge. Two that differ, or a range, are none."""

import re
from dataclasses import dataclass
from typing import final

from luyen.rewards.judge_faults import UNPARSABLE, JudgeFault, shown

_NUMBER = r"(?<![\w.])[-+]?(?:nan|inf(?:inity)?|(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?)(?!\w|\.\d)"
_TOTAL = r"(?:\s*(?:/|(?:out\s+)?of)\s*(?P<total>\d+(?:\.\d+)?)(?!\w|\.\d)|\s*(?P<percent>%))?"
_BETWEEN = r"(?:[^\w.+-]|_){0,6}"
"""What may stand before the number: a sign and a point belong to it."""
_LIMIT = r"\d+(?:\.\d+)?"
_RANGE = rf"(?:\s*[(\[]\s*(?:{_LIMIT}\s*(?:[-\u2013\u2014/]|to)|out of|of|/)\s*{_LIMIT}\s*[)\]])?"
"""The scale in brackets behind the word, as in `Score (0-10): 7`."""
_LABEL = rf"(?<![^\W_])(?:score|rating|grade|mark)s?{_RANGE}"
_WORTH = rf"(?P<number>{_NUMBER}){_TOTAL}"

_BRACKETS = re.compile(rf"\[\[\s*{_WORTH}\s*\]\]", re.IGNORECASE)
_OWN_LINE = re.compile(
    rf"^[ \t*_#>\-]{{0,20}}(?:(?:the|my|final|overall|total)\s+){{0,3}}{_LABEL}"
    rf"{_BETWEEN}(?:\bis\b)?{_BETWEEN}{_WORTH}[ \t*_.!\"')\]`]*$",
    re.IGNORECASE | re.MULTILINE,
)
_STATED = re.compile(rf"{_LABEL}{_BETWEEN}(?:[:=>]|\bis\b){_BETWEEN}{_WORTH}", re.IGNORECASE)
_MENTIONED = re.compile(rf"{_LABEL}{_BETWEEN}(?:\bof\b)?{_BETWEEN}{_WORTH}", re.IGNORECASE)
_ANY = re.compile(_WORTH, re.IGNORECASE)

_GOES_ON = re.compile(r"\s*(?:[-\u2013\u2014~±]|\bto\b|\bor\b)\s*\.?\d|,\d", re.IGNORECASE)
"""Behind a number: a range, an alternative, or a comma that could be a point."""
_BOUND = re.compile(r"(?:[<≤≥~≈]|(?<![\w\"'/])>)\s{0,6}\Z")
"""Before a number: it is about that, or on one side of it. A tag may stand there."""
_COUNTS = re.compile(
    r"\s+(?!(?:points?|stars?|percent|overall|for|because|since|as|and|but)\b)[^\W\d_]",
    re.IGNORECASE,
)
"""Behind a number that nothing states: it counts something else, as in `2 errors`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A number as it is written, and what it is a part of.

    Example:
        >>> Found(number="7", total="10").total
        '10'
    """

    number: str
    """The score."""
    total: str | None
    """What stands behind `/` or `out of`; 100 for a percent sign."""


def score_in(text: str) -> Found:
    """The score that a text gives; a JudgeFault where it gives none, or not clearly one.

    The first place that holds a number decides: double brackets, a line that says the score and
    nothing else, what is stated anywhere (`score: 7`, `the rating is 7`), and at last the only
    number of the text. If a place holds different numbers, there is no score.

    Example:
        >>> score_in("A 10 would need a proof.\\nScore (0-10): 7").number
        '7'
    """
    for pattern in (_BRACKETS, _OWN_LINE):
        found = list(pattern.finditer(text))
        if found:
            return _only(_settled(found, text), text)
    stated = list(_STATED.finditer(text))
    if stated:
        return _only(_settled([*stated, *_MENTIONED.finditer(text)], text), text)
    alone = list(_ANY.finditer(text))
    if len(alone) > 1:
        raise JudgeFault(UNPARSABLE, f"several numbers in {shown(text)}")
    if any(_COUNTS.match(text, match.end()) for match in alone):
        raise JudgeFault(UNPARSABLE, f"a number that may count something else in {shown(text)}")
    return _only(_settled(alone, text), text)


def _settled(found: list[re.Match[str]], text: str) -> list[re.Match[str]]:
    for match in found:
        at = match.start("number")
        if _GOES_ON.match(text, match.end()) or _BOUND.search(text[max(at - 8, 0) : at]):
            raise JudgeFault(UNPARSABLE, f"a range, or a number that goes on, in {shown(text)}")
    return found


def _only(found: list[re.Match[str]], text: str) -> Found:
    """What all of them say."""
    if not found:
        raise JudgeFault(UNPARSABLE, f"no numbers in {shown(text)}")
    numbers = {str(float(match["number"])) for match in found}
    totals = {"100" if match["percent"] else match["total"] for match in found} - {None}
    if len(numbers) > 1 or len(totals) > 1:
        raise JudgeFault(UNPARSABLE, f"several numbers in {shown(text)}")
    return Found(number=found[-1]["number"], total=totals.pop() if totals else None)
