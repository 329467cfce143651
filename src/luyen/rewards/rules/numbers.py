"""Numbers in text: the last one counts."""

import re
from decimal import Context, Decimal, InvalidOperation, localcontext

from luyen.base.records import Prompt
from luyen.rewards.outcome import Unscorable
from luyen.rewards.rules.rule import Answer, rule_rewards, truths_of

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER = re.compile(
    rf"(?:(?<![\w.)\]])[-+])?(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
)
_LONGEST = 10_000
"""Digits beyond this are no answer but noise."""


def last_number(text: str) -> Decimal | None:
    """The last number of a text: signs, thousands separators, decimals and exponents understood.

    Example:
        >>> [str(last_number(text)) for text in ("from 2 to -3", "1,234.50", "2e3", "none")]
        ['-3', '1234.50', '2E+3', 'None']
    """
    written: list[str] = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return next((n for one in reversed(written) if (n := as_number(one)) is not None), None)


def as_number(text: str) -> Decimal | None:
    """A text that is one number; None when it is not, or is beyond all bounds."""
    plain = text.strip().lstrip("$").replace("\N{MINUS SIGN}", "-")
    if len(plain) > _LONGEST or _NUMBER.fullmatch(plain) is None:
        return None
    try:
        return Decimal(plain.replace(",", ""))
    except InvalidOperation:
        return None


def true_numbers(prompt: Prompt) -> list[Decimal]:
    """The ground truth as numbers; a row whose truth is none cannot be judged."""
    truths = {text: as_number(text) for text in truths_of(prompt)}
    wrong = [text for text, number in truths.items() if number is None]
    if wrong:
        raise Unscorable(f"the row's ground truth {wrong[0]!r} is not a number")
    return [number for number in truths.values() if number is not None]


def is_close(a: Decimal, b: Decimal, *, tolerance: float) -> bool:
    """Whether two numbers differ by at most the tolerance; 0 asks for equality, digit for digit."""
    if a == b:
        return True
    with localcontext(Context(prec=60, traps=[])):
        return tolerance > 0 and abs(a - b) <= Decimal(repr(tolerance))


@rule_rewards.register("numeric", wrong=0.0)
def numeric(prompt: Prompt, answer: Answer, *, tolerance: float = 0.0) -> float:
    """1 when the last number of the answer is the ground truth."""
    truths, found = true_numbers(prompt), last_number(answer.text)
    if found is None:
        return 0.0
    return float(any(is_close(found, truth, tolerance=tolerance) for truth in truths))
