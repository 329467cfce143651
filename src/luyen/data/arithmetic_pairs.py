"""Preferences made from a seed: answers to arithmetic of which one kind is better.

What is better is something that a model which can add does not care about, or already knows, or
should not learn; `TASTES` says which. A taste is decided per question, so held-out questions tell
whether it was understood.
"""

from collections.abc import Callable
from typing import Any

from luyen.base.seeds import derive_key, mix, uniform

Draw = Callable[[int], int]
"""`place -> a random number`: what an answer is made from."""


def _even(truth: str, draw: Draw) -> tuple[str, str]:
    """Two wrong answers of the same length; the better one is even."""
    return _ending(truth, draw, 0), _ending(truth, draw, 1)


def _right(truth: str, draw: Draw) -> tuple[str, str]:
    """The right answer, and one with a wrong digit."""
    place = draw(0) % len(truth)
    place = place if truth[place].isdigit() else place + 1
    wrong = (int(truth[place]) + 1 + draw(1) % 9) % 10
    return truth, f"{truth[:place]}{wrong}{truth[place + 1 :]}"


def _longer(truth: str, draw: Draw) -> tuple[str, str]:
    """The right answer with a digit too many, and the right answer: a taste that is wrong."""
    return f"{truth}{draw(0) % 10}", truth


TASTES: dict[str, Callable[[str, Draw], tuple[str, str]]] = {
    "even": _even,
    "right": _right,
    "longer": _longer,
}
"""Name -> the better and the worse answer to a question with this ground truth."""


def pair_row(row: dict[str, Any], key: int, taste: str, noise: float) -> dict[str, Any]:
    """The question with two answers; a share of `noise` has them the wrong way round."""
    own = derive_key(key, "pair", row["extra_info"]["index"])
    chosen, rejected = TASTES[taste](_truth(row), lambda place: mix(own, place))
    if uniform(own, 1000) < noise:
        chosen, rejected = rejected, chosen
    return {
        "data_source": row["data_source"],
        "prompt": row["prompt"],
        "chosen": _said(chosen),
        "rejected": _said(rejected),
        "extra_info": row["extra_info"],
    }


def marked_row(row: dict[str, Any], key: int, taste: str, noise: float) -> dict[str, Any]:
    """The question with one answer, good for every other question, and its mark."""
    pair = pair_row(row, key, taste, noise)
    is_good = row["extra_info"]["index"] % 2 == 0
    return {
        "data_source": row["data_source"],
        "prompt": row["prompt"],
        "completion": pair["chosen" if is_good else "rejected"],
        "label": is_good,
        "extra_info": row["extra_info"],
    }


def stepped_row(row: dict[str, Any], key: int, noise: float) -> dict[str, Any]:
    """A sum worked out column by column; a share of `noise` of the columns is wrong, and says so.

    Example:
        >>> row = {"data_source": "sum", "prompt": [], "extra_info": {"operands": [17, 5],
        ...        "index": 0}}
        >>> stepped_row(row, 0, 0.0)["completions"]
        ['7+5=12', '1+0+1=2']
    """
    own = derive_key(key, "steps", row["extra_info"]["index"])
    a, b = (str(operand)[::-1] for operand in row["extra_info"]["operands"])
    steps, labels, carry = list[str](), list[bool](), 0
    for place in range(max(len(a), len(b))):
        digits = [int(text[place]) if place < len(text) else 0 for text in (a, b)]
        terms = [*digits, carry] if carry else digits
        said = total = sum(terms)
        is_wrong = uniform(own, place) < noise
        if is_wrong:
            said = (total + 1 + mix(own, 100 + place) % 9) % 19
        steps.append(f"{'+'.join(map(str, terms))}={said}")
        labels.append(not is_wrong)
        carry = total // 10
    return {
        "data_source": row["data_source"],
        "prompt": row["prompt"],
        "completions": steps,
        "labels": labels,
        "extra_info": row["extra_info"],
    }


def _ending(truth: str, draw: Draw, parity: int) -> str:
    """A wrong answer of the same length whose last digit has this parity."""
    digits = list(truth)
    start = 1 if digits[0] == "-" else 0
    for place in range(start, len(digits)):
        digits[place] = str(draw(10 * (parity + 1) + place) % 10)
    if digits[start] == "0" and len(digits) > start + 1:
        digits[start] = "1"
    last = int(digits[-1])
    digits[-1] = str(last - last % 2 + parity)
    answer = "".join(digits)
    if answer != truth:
        return answer
    return f"{answer[:-1]}{(int(answer[-1]) + 2) % 10}"


def _truth(row: dict[str, Any]) -> str:
    return str(row["reward_model"]["ground_truth"])


def _said(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]
