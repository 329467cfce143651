"""Arithmetic made from a seed: rows without a download.

Whether a pair of operands is held out depends on the unordered pair and on nothing else: not on the
seed, the size, the operation or the number of digits. No training row ever shares its operands with
a held-out row, however the two addresses are written.
"""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

from luyen.base.seeds import derive_key, mix, shuffled, uniform
from luyen.base.suggest import did_you_mean
from luyen.data.arithmetic_pairs import TASTES, marked_row, pair_row, stepped_row
from luyen.data.task_url import TaskUrl

SPLITS = ("train", "held-out")
HELD_OUT_ONE_IN = 8
DEFAULT_SIZE = {"train": 4096, "held-out": 256}
QUESTION_KEYS = ("digits", "seed", "size", "split")
"""What an address may say about the questions, whatever is done with them."""
_TAUGHT = ("traces", "pairs", "labels", "steps")
"""What an address may say about answers to learn from."""
_ENUMERABLE_DIGITS = 2
_MOST_DIGITS = 9
_SPLIT_KEY = derive_key(0, "arithmetic/split")

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
    if url.name not in OPERATIONS:
        raise url.error(f"no operation `{url.name}`", did_you_mean(url.name, OPERATIONS))
    url.refuse_unknown((*QUESTION_KEYS, *_TAUGHT, "noise"))
    if len(asked := [name for name in _TAUGHT if name in url.query]) > 1:
        raise url.error(f"{' and '.join(asked)} ask for different rows", "keep one of them")
    rows, key = questions(url, url.name, digits=2)
    traces = url.integer("traces", 0, least=0, most=1000)
    noise = url.share("noise", 0.0)
    if traces:
        return [_trace(row, key, noise, t) for row in rows for t in range(traces)]
    if "pairs" in asked:
        taste = url.choice("pairs", "even", tuple(TASTES))
        return [pair_row(row, key, taste, noise) for row in rows]
    if "labels" in asked:
        taste = url.choice("labels", "even", tuple(TASTES))
        return [marked_row(row, key, taste, noise) for row in rows]
    if "steps" in asked and url.integer("steps", 0, least=0, most=1):
        if url.name != "sum":
            raise url.error("only sums are worked out in steps", "use arithmetic://sum")
        return [stepped_row(row, key, noise) for row in rows]
    return rows


def questions(
    url: TaskUrl, operation: str, *, digits: int, is_exact: bool = False
) -> tuple[list[dict[str, Any]], int]:
    """The rows of an operation that an address asks for, and the key that they were drawn with.

    `digits` holds where the address says nothing about it. With `is_exact` operands have no fewer.
    """
    digits = url.integer("digits", digits, least=1, most=_MOST_DIGITS)
    seed = url.integer("seed", 0, least=0, most=2**63 - 1)
    split = url.choice("split", "train", SPLITS)
    least = 10 ** (digits - 1) if is_exact else 0
    most = _available(digits, split, least)
    size = url.integer("size", min(DEFAULT_SIZE[split], most), least=1, most=most)
    key = derive_key(seed, f"arithmetic/{operation}/{split}", digits)
    pairs = islice(_pairs(digits, split, key, least), size)
    return [_row(operation, split, i, a, b) for i, (a, b) in enumerate(pairs)], key


def is_held_out(a: int, b: int) -> bool:
    """Whether a pair of operands is kept away from training, in either order.

    Example:
        >>> is_held_out(12, 34) == is_held_out(34, 12)
        True
    """
    low, high = sorted((a, b))
    return mix(mix(_SPLIT_KEY, low), high) % HELD_OUT_ONE_IN == 0


def _available(digits: int, split: str, least: int) -> int:
    """Most rows that a split can give: all its pairs, or half of them where they are many."""
    if digits <= _ENUMERABLE_DIGITS:
        return len(_enumerated(digits, split, least))
    operands = 10**digits - least
    pairs = operands * (operands + 1) // 2
    share = 1 if split == "held-out" else HELD_OUT_ONE_IN - 1
    return min(pairs * share // HELD_OUT_ONE_IN // 2, 1_000_000)


def _enumerated(digits: int, split: str, least: int) -> list[tuple[int, int]]:
    operands = range(least, 10**digits)
    wanted = split == "held-out"
    return [(a, b) for a in operands for b in operands if a <= b and is_held_out(a, b) == wanted]


def _pairs(digits: int, split: str, key: int, least: int) -> Iterator[tuple[int, int]]:
    """Pairs of the split in random order, each unordered pair once, either operand first."""
    if digits <= _ENUMERABLE_DIGITS:
        pairs = _enumerated(digits, split, least)
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
