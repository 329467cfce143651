"""Grade-school word problems: the answer follows `####`."""

from decimal import Decimal
from typing import Literal

from luyen.base.records import Prompt
from luyen.rewards.outcome import Unscorable
from luyen.rewards.rules.numbers import as_number, last_number
from luyen.rewards.rules.rule import Answer, rule_rewards, truths_of

_MARK = "####"
_AROUND = " \t.$*"


def strict_answer(text: str) -> Decimal | None:
    """The number that opens the line after the last `####`.

    Example:
        >>> strict_answer("so 70 + 2 = 72 #### $1,072 apples")
        Decimal('1072')
    """
    _, mark, rest = text.rpartition(_MARK)
    words = rest.strip(" \t").partition("\n")[0].split()
    if not mark or not words:
        return None
    first = words[1] if words[0] == "$" and len(words) > 1 else words[0]
    return as_number(first.lstrip("$*").rstrip(_AROUND))


def flexible_answer(text: str) -> Decimal | None:
    """The last number anywhere."""
    return last_number(text)


@rule_rewards.register("gsm8k", wrong=0.0)
def gsm8k(
    prompt: Prompt,
    answer: Answer,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
) -> float:
    """1 for the right number, `format_score` for another in the right place, 0 for none."""
    if method not in ("strict", "flexible"):
        raise Unscorable(f"method {method!r} is neither strict nor flexible")
    found = (strict_answer if method == "strict" else flexible_answer)(answer.text)
    truths = [
        strict_answer(text) if _MARK in text else as_number(text) for text in truths_of(prompt)
    ]
    if None in truths:
        raise Unscorable(f"the row's ground truth {prompt.ground_truth!r} holds no number")
    if found is None:
        return 0.0
    return 1.0 if found in truths else format_score
