"""Arithmetic made from a seed: prompts, and preferences between answers, without a download."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from luyen.base.seeds import derive_key, mix, shuffled, uniform
from luyen.config.task_urls import (
    ENUMERABLE_DIGITS,
    ArithmeticQuestions,
    TaskUrl,
    enumerated,
    is_held_out,
    read_arithmetic,
)

# Preferences made from a seed: answers to arithmetic of which one kind is better.
#
# What is better is something that a model which can add does not care about, or already knows,
# or should not learn; `PREFERENCES` says which. A taste is decided per question, so held-out
# questions tell whether it was understood.

Sample = Callable[[int], int]
"""`place -> a random number`: what an answer is made from."""


def _even(truth: str, sample: Sample) -> tuple[str, str]:
    """Two wrong answers of the same length; the better one is even."""
    return _ending(truth, sample, 0), _ending(truth, sample, 1)


def _right(truth: str, sample: Sample) -> tuple[str, str]:
    """The right answer, and one with a wrong digit."""
    place = sample(0) % len(truth)
    place = place if truth[place].isdigit() else place + 1
    wrong = (int(truth[place]) + 1 + sample(1) % 9) % 10
    return truth, f"{truth[:place]}{wrong}{truth[place + 1 :]}"


def _longer(truth: str, sample: Sample) -> tuple[str, str]:
    """The right answer with a digit too many, and the right answer: a taste that is wrong."""
    return f"{truth}{sample(0) % 10}", truth


PREFERENCES: dict[str, Callable[[str, Sample], tuple[str, str]]] = {
    "even": _even,
    "right": _right,
    "longer": _longer,
}
"""Name -> the better and the worse answer to a question with this ground truth."""


def pair_row(row: dict[str, Any], key: int, taste: str, noise: float) -> dict[str, Any]:
    """The question with two answers; a share of `noise` has them the wrong way round."""
    own = derive_key(key, "pair", row["extra_info"]["index"])
    chosen, rejected = PREFERENCES[taste](_truth(row), lambda place: mix(own, place))
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


def _ending(truth: str, sample: Sample, parity: int) -> str:
    """A wrong answer of the same length whose last digit has this parity."""
    digits = list(truth)
    start = 1 if digits[0] == "-" else 0
    for place in range(start, len(digits)):
        digits[place] = str(sample(10 * (parity + 1) + place) % 10)
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


OPERATIONS: dict[str, tuple[str, Callable[[int, int], int]]] = {
    "sum": ("+", lambda a, b: a + b),
    "difference": ("-", lambda a, b: a - b),
    "product": ("*", lambda a, b: a * b),
}
"""Name -> sign and meaning."""


def arithmetic_rows(url: TaskUrl) -> list[dict[str, Any]]:
    """Rows of `arithmetic://OPERATION?digits=2&seed=0&size=4096&split=train`.

    Operands have at most `digits` digits. A larger `size` with the same seed begins with the rows
    of a smaller one. A difference puts the larger operand first, so it is never negative.

    With `traces=N`, rows are conversations to learn from: N answers to each pair, of which a share
    of `noise` has one wrong digit. Answers to one pair stand together. With `pairs=TASTE` each
    question has a better and a worse answer, with `labels=TASTE` one that is marked, and with
    `steps=1` a sum is worked out in steps that are marked; a share of `noise` is marked wrongly.
    """
    task = read_arithmetic(url)
    rows, key = questions(task.questions, url.name)
    noise, taste = task.noise, task.taste
    match task.taught:
        case "traces":
            return [_trace(row, key, noise, t) for row in rows for t in range(task.traces)]
        case "pairs":
            return [pair_row(row, key, taste, noise) for row in rows]
        case "labels":
            return [marked_row(row, key, taste, noise) for row in rows]
        case "steps":
            return [stepped_row(row, key, noise) for row in rows]
        case None:
            return rows


def questions(spec: ArithmeticQuestions, operation: str) -> tuple[list[dict[str, Any]], int]:
    """The rows of an operation that an address specifies, and the random key of their operands."""
    split, digits = spec.split, spec.digits
    key = derive_key(spec.seed, f"arithmetic/{operation}/{split}", digits)
    pairs = islice(_pairs(digits, split, key, spec.least), spec.size)
    return [_row(operation, split, i, a, b) for i, (a, b) in enumerate(pairs)], key


def _pairs(digits: int, split: str, key: int, least: int) -> Iterator[tuple[int, int]]:
    """Pairs of the split in random order, each unordered pair once, either operand first."""
    if digits <= ENUMERABLE_DIGITS:
        pairs = enumerated(digits, split, least)
        for i in shuffled(len(pairs), key):
            a, b = pairs[i]
            yield (a, b) if mix(key, len(pairs) + i) >> 63 else (b, a)
        return
    seen: set[tuple[int, int]] = set()
    position = 0
    while True:
        a, b = mix(key, position) % 10**digits, mix(key, position + 1) % 10**digits
        position += 2
        pair = (min(a, b), max(a, b))
        is_wanted = pair[0] >= least and is_held_out(a, b) == (split == "held-out")
        if is_wanted and pair not in seen:
            seen.add(pair)
            yield a, b


def _row(name: str, split: str, index: int, a: int, b: int) -> dict[str, Any]:
    sign, compute = OPERATIONS[name]
    if name == "difference":
        a, b = max(a, b), min(a, b)
    return {
        "data_source": f"arithmetic/{name}",
        "prompt": [{"role": "user", "content": f"{a}{sign}{b}="}],
        "reward_model": {"style": "rule", "ground_truth": str(compute(a, b))},
        "extra_info": {
            "split": split,
            "index": index,
            "operands": [a, b],
            "difficulty": len(str(a)) + len(str(b)),
        },
    }


def _trace(row: dict[str, Any], key: int, noise: float, trace: int) -> dict[str, Any]:
    """The row as a conversation, answered rightly or with one wrong digit."""
    own = derive_key(key, "trace", row["extra_info"]["index"], trace)
    answer = str(row["reward_model"]["ground_truth"])
    if uniform(own, 0) < noise:
        place = mix(own, 1) % len(answer)
        # A minus sign stays: only digits are replaced.
        place = place if answer[place].isdigit() else place + 1
        wrong = (int(answer[place]) + 1 + mix(own, 2) % 9) % 10
        answer = f"{answer[:place]}{wrong}{answer[place + 1 :]}"
    said = {"role": "assistant", "content": answer}
    info = {**row["extra_info"], "trace": trace}
    return {
        "data_source": row["data_source"],
        "messages": [*row["prompt"], said],
        "extra_info": info,
    }
