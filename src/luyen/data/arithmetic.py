"""Arithmetic made from a seed: rows without a download."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from luyen.base.seeds import derive_key, mix, shuffled, uniform
from luyen.config.arithmetic_task import (
    ENUMERABLE_DIGITS,
    Asked,
    enumerated,
    is_held_out,
    read_arithmetic,
)
from luyen.config.task_url import TaskUrl
from luyen.data.arithmetic_pairs import marked_row, pair_row, stepped_row

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
    rows, key = questions(task.asked, url.name)
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


def questions(asked: Asked, operation: str) -> tuple[list[dict[str, Any]], int]:
    """The rows of an operation that an address asks for, and the key that they were drawn with."""
    split, digits = asked.split, asked.digits
    key = derive_key(asked.seed, f"arithmetic/{operation}/{split}", digits)
    pairs = islice(_pairs(digits, split, key, asked.least), asked.size)
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
