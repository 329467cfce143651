"""What an address of `arithmetic://` asks for, and which operands are held out.

Whether a pair of operands is held out depends on the unordered pair and on nothing else: not on the
seed, the size, the operation or the number of digits. No training row ever shares its operands with
a held-out row, however the two addresses are written.
"""

from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeAlias, cast, final

from luyen.base.seeds import derive_key, mix
from luyen.base.suggest import did_you_mean
from luyen.config.task_url import TaskUrl

Taught: TypeAlias = Literal["traces", "pairs", "labels", "steps"]
OPERATIONS = ("sum", "difference", "product")
TASTES = ("even", "right", "longer")
SPLITS = ("train", "held-out")
HELD_OUT_ONE_IN = 8
DEFAULT_SIZE = {"train": 4096, "held-out": 256}
QUESTION_KEYS = ("digits", "seed", "size", "split")
"""What an address may say about the questions, whatever is done with them."""
MOST_TRACES = 1000
ENUMERABLE_DIGITS = 2
_TAUGHT: tuple[Taught, ...] = ("traces", "pairs", "labels", "steps")
_MOST_DIGITS = 9
_MOST_ROWS = 1_000_000
_SPLIT_KEY = derive_key(0, "arithmetic/split")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Which questions an address asks for.

    Example:
        >>> Asked(digits=2, least=0, seed=0, split="train", size=8).size
        8
    """

    digits: int
    """Most digits of an operand."""
    least: int
    """Smallest operand."""
    seed: int
    """What the operands are drawn from."""
    split: str
    """`train` or `held-out`."""
    size: int
    """Number of questions."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticTask:
    """Which rows an address asks for.

    Example:
        >>> from luyen.config.task_url import parse_task_url
        >>> read_arithmetic(parse_task_url("arithmetic://sum?pairs=even")).taught
        'pairs'
    """

    asked: Asked
    """The questions."""
    taught: Taught | None
    """What is there to learn from besides; None: the questions alone."""
    traces: int
    """Answers to each question."""
    taste: str
    """Which answers are better."""
    noise: float
    """Share of what is wrong on purpose."""


def read_arithmetic(url: TaskUrl) -> ArithmeticTask:
    """What the address says; a UserError where it makes no sense."""
    if url.name not in OPERATIONS:
        raise url.error(f"no operation `{url.name}`", did_you_mean(url.name, OPERATIONS))
    url.refuse_unknown((*QUESTION_KEYS, *_TAUGHT, "noise"))
    named: list[Taught] = [name for name in _TAUGHT if name in url.query]
    if len(named) > 1:
        raise url.error(f"{' and '.join(named)} ask for different rows", "keep one of them")
    taught: Taught | None = named[0] if named else None
    if taught in ("traces", "steps") and not url.integer(taught, 0, least=0, most=_most(taught)):
        taught = None
    if taught == "steps" and url.name != "sum":
        raise url.error("only sums are worked out in steps", "use arithmetic://sum")
    is_judged = taught in ("pairs", "labels")
    return ArithmeticTask(
        asked=read_asked(url, digits=2, factor=int(url.query.get("traces") or 1)),
        taught=taught,
        traces=int(url.query.get("traces", 0)),
        taste=url.choice(cast(str, taught), "even", TASTES) if is_judged else "even",
        noise=url.share("noise", 0.0),
    )


def _most(taught: Taught) -> int:
    return MOST_TRACES if taught == "traces" else 1


def read_asked(url: TaskUrl, *, digits: int, is_exact: bool = False, factor: int = 1) -> Asked:
    """The questions of an address; `digits` holds where it says nothing about them.

    With `is_exact` operands have no fewer digits. `factor` is how many rows each question makes.
    """
    digits = url.integer("digits", digits, least=1, most=_MOST_DIGITS)
    seed = url.integer("seed", 0, least=0, most=2**63 - 1)
    split = url.choice("split", "train", SPLITS)
    least = 10 ** (digits - 1) if is_exact else 0
    most = available(digits, split, least)
    size = url.integer("size", min(DEFAULT_SIZE[split], most), least=1, most=most)
    require_rows(url, size, factor)
    return Asked(digits=digits, least=least, seed=seed, split=split, size=size)


def require_rows(url: TaskUrl, size: int, factor: int) -> None:
    """A UserError where so many rows would not fit into memory."""
    if size * factor > _MOST_ROWS:
        why = f"{size:,} questions with {factor:,} answers each are more than {_MOST_ROWS:,} rows"
        raise url.error(why, "lower size or traces")


def is_held_out(a: int, b: int) -> bool:
    """Whether a pair of operands is kept away from training, in either order.

    Example:
        >>> is_held_out(12, 34) == is_held_out(34, 12)
        True
    """
    low, high = sorted((a, b))
    return mix(mix(_SPLIT_KEY, low), high) % HELD_OUT_ONE_IN == 0


@cache
def available(digits: int, split: str, least: int) -> int:
    """Most rows that a split can give: all its pairs, or half of them where they are many."""
    if digits <= ENUMERABLE_DIGITS:
        return len(enumerated(digits, split, least))
    operands = 10**digits - least
    pairs = operands * (operands + 1) // 2
    share = 1 if split == "held-out" else HELD_OUT_ONE_IN - 1
    return min(pairs * share // HELD_OUT_ONE_IN // 2, _MOST_ROWS)


def enumerated(digits: int, split: str, least: int) -> list[tuple[int, int]]:
    """All pairs of a split, in order."""
    operands = range(least, 10**digits)
    wanted = split == "held-out"
    return [(a, b) for a in operands for b in operands if a <= b and is_held_out(a, b) == wanted]
