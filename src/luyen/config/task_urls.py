"""Addresses of generated or hub rows (`scheme://name?key=value`): what each may say.

`check` and the code that generates the rows both parse addresses here, so both refuse the same
addresses with the same message.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, TypeAlias, cast, final
from urllib.parse import parse_qsl

from luyen.base.errors import UserError, did_you_mean
from luyen.base.seeds import derive_key, mix

# Addresses of task sources: `scheme://name?key=value`, checked key by key.

FIELD = "data.train_files"
"""What errors about an address name, until a caller knows which key it was."""
_WHOLE = re.compile(r"-?[0-9]{1,19}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TaskUrl:
    """An address, taken apart.

    Example:
        >>> parse_task_url("arithmetic://sum?digits=2").query
        {'digits': '2'}
    """

    text: str
    """The address as it was written."""
    scheme: str
    """Who makes the rows."""
    name: str
    """Which rows."""
    query: Mapping[str, str]
    """Values by key, as text."""

    def refuse_unknown(self, known: Iterable[str]) -> None:
        """A UserError unless every key is known."""
        names = list(known)
        for key in self.query:
            if key not in names:
                raise self.error(f"unknown key `{key}`", did_you_mean(key, names))

    def integer(self, key: str, default: int, *, least: int, most: int) -> int:
        """The value of a key as a number within limits."""
        text = self.query.get(key, str(default))
        if not _WHOLE.fullmatch(text) or not least <= int(text) <= most:
            why = f"`{key}={text}` is no whole number from {least} to {most}"
            raise self.error(why, f"write {key}={default}, for instance")
        return int(text)

    def share(self, key: str, default: float) -> float:
        """A number from 0 to 1."""
        if key not in self.query:
            return default
        try:
            value = float(self.query[key])
        except ValueError:
            value = -1.0
        if not 0.0 <= value <= 1.0:
            raise self.error(f"`{key}={self.query[key]}` is not between 0 and 1", "correct it")
        return value

    def choice(self, key: str, default: str, choices: Iterable[str]) -> str:
        """The value of a key that has a closed set of values."""
        text, known = self.query.get(key, default), list(choices)
        if text not in known:
            raise self.error(f"`{key}={text}` is not a choice", did_you_mean(text, known))
        return text

    def error(self, why: str, fix: str) -> UserError:
        """An error about this address."""
        return UserError(FIELD, self.text, why, fix)


def parse_task_url(text: str) -> TaskUrl:
    """The address taken apart; a key given twice or without a value is refused."""
    scheme, _, rest = text.partition("://")
    name, _, written = rest.partition("?")
    pairs = parse_qsl(written, keep_blank_values=True)
    if scheme == "hf":
        name, short = _short_form(name)
        pairs = [*short, *pairs]
    url = TaskUrl(text=text, scheme=scheme, name=name.strip("/"), query=dict(pairs))
    twice = sorted({key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1})
    if twice:
        raise url.error(f"`{twice[0]}` is given twice", "keep one of them")
    empty = [key for key, value in pairs if not value]
    if empty:
        raise url.error(f"`{empty[0]}` has no value", f"write {empty[0]}=VALUE, or drop it")
    return url


def _short_form(name: str) -> tuple[str, list[tuple[str, str]]]:
    """Name of a dataset, and what `OWNER/NAME@REVISION:SPLIT` says besides it.

    Example:
        >>> _short_form("org/rows@v1:test")
        ('org/rows', [('revision', 'v1'), ('split', 'test')])
    """
    rest, colon, split = name.partition(":")
    plain, at, revision = rest.partition("@")
    said = [("revision", revision)] if at else []
    return plain, [*said, *([("split", split)] if colon else [])]


# Addresses of `arithmetic://`, and the split into train and held-out operands.
#
# Whether a pair of operands is held out depends on the unordered pair and on nothing else: not
# on the seed, the size, the operation or the number of digits. No training row ever shares its
# operands with a held-out row, however the two addresses are written.

Supervision: TypeAlias = Literal["traces", "pairs", "labels", "steps"]
OPERATIONS = ("sum", "difference", "product")
PREFERENCE_CRITERIA = ("even", "right", "longer")
SPLITS = ("train", "held-out")
HELD_OUT_ONE_IN = 8
DEFAULT_SIZE = {"train": 4096, "held-out": 256}
QUESTION_KEYS = ("digits", "seed", "size", "split")
"""What an address may say about the questions, whatever is done with them."""
MOST_TRACES = 1000
ENUMERABLE_DIGITS = 2
_SUPERVISION: tuple[Supervision, ...] = ("traces", "pairs", "labels", "steps")
_MOST_DIGITS = 9
_MOST_ROWS = 1_000_000
_SPLIT_KEY = derive_key(0, "arithmetic/split")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticQuestions:
    """The questions that an address describes.

    Example:
        >>> ArithmeticQuestions(digits=2, least=0, seed=0, split="train", size=8).size
        8
    """

    digits: int
    """Most digits of an operand."""
    least: int
    """Smallest operand."""
    seed: int
    """Seed of the operands."""
    split: str
    """`train` or `held-out`."""
    size: int
    """Number of questions."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticTask:
    """The rows that an address describes.

    Example:
        >>> from luyen.config.task_urls import parse_task_url
        >>> read_arithmetic(parse_task_url("arithmetic://sum?pairs=even")).taught
        'pairs'
    """

    questions: ArithmeticQuestions
    """The questions."""
    taught: Supervision | None
    """Kind of training target; None: the questions alone."""
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
    url.refuse_unknown((*QUESTION_KEYS, *_SUPERVISION, "noise"))
    named: list[Supervision] = [name for name in _SUPERVISION if name in url.query]
    if len(named) > 1:
        raise url.error(f"{' and '.join(named)} ask for different rows", "keep one of them")
    taught: Supervision | None = named[0] if named else None
    if taught in ("traces", "steps") and not url.integer(taught, 0, least=0, most=_most(taught)):
        taught = None
    if taught == "steps" and url.name != "sum":
        raise url.error("only sums are worked out in steps", "use arithmetic://sum")
    is_judged = taught in ("pairs", "labels")
    return ArithmeticTask(
        questions=read_questions(url, digits=2, factor=int(url.query.get("traces") or 1)),
        taught=taught,
        traces=int(url.query.get("traces", 0)),
        taste=url.choice(cast(str, taught), "even", PREFERENCE_CRITERIA) if is_judged else "even",
        noise=url.share("noise", 0.0),
    )


def _most(taught: Supervision) -> int:
    return MOST_TRACES if taught == "traces" else 1


def read_questions(
    url: TaskUrl, *, digits: int, is_exact: bool = False, factor: int = 1
) -> ArithmeticQuestions:
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
    return ArithmeticQuestions(digits=digits, least=least, seed=seed, split=split, size=size)


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


TOOL_TASKS = ("calculator", "orders", "both")
HUB_KEYS = ("split", "config", "revision")
_GYM_SIZE = 1000
_MOST_TASKS = 10_000_000
_SEEDS = 2**63 - 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ToolTask:
    """The rows that an address of `tools://` describes.

    Example:
        >>> read_tool_task(parse_task_url("tools://orders?size=8")).questions.size
        8
    """

    questions: ArithmeticQuestions
    """The questions."""
    traces: int
    """Conversations to learn from for each question; 0: the questions alone."""
    calls: float
    """Share of turns at which the assistant calls the right tool."""
    bare: float = 0.0
    """Share of conversations without tools."""
    order_calls: float = 1.0
    """`both`: the share for orders."""


def require_task(address: str) -> None:
    """A UserError where the rows of an address could not be made; its scheme is known.

    Example:
        >>> from luyen.base.errors import UserError
        >>> try:
        ...     require_task("arithmetic://sum?digits=3&size=0")
        ... except UserError as error:
        ...     error.why
        '`size=0` is no whole number from 1 to 218968'
    """
    url = parse_task_url(address)
    _READERS[url.scheme](url)


def read_tool_task(url: TaskUrl) -> ToolTask:
    """What the address says; a UserError where it makes no sense."""
    if url.name not in TOOL_TASKS:
        raise url.error(f"no task `{url.name}`", did_you_mean(url.name, TOOL_TASKS))
    return {"calculator": _calculator, "orders": _orders, "both": _both}[url.name](url)


def _calculator(url: TaskUrl) -> ToolTask:
    url.refuse_unknown((*QUESTION_KEYS, "traces", "calls", "bare"))
    traces = url.integer("traces", 0, least=0, most=MOST_TRACES)
    questions = read_questions(url, digits=3, is_exact=True, factor=max(traces, 1))
    calls, bare = url.share("calls", 1.0), url.share("bare", 0.0)
    return ToolTask(questions=questions, traces=traces, calls=calls, bare=bare)


def _orders(url: TaskUrl) -> ToolTask:
    url.refuse_unknown(("seed", "size", "split", "traces", "calls"))
    traces = url.integer("traces", 0, least=0, most=MOST_TRACES)
    split = url.choice("split", "train", SPLITS)
    size = url.integer("size", DEFAULT_SIZE[split], least=1, most=1_000_000)
    require_rows(url, size, max(traces, 1))
    return ToolTask(
        questions=_plainly(url, split, size), traces=traces, calls=url.share("calls", 1.0)
    )


def _both(url: TaskUrl) -> ToolTask:
    url.refuse_unknown(("seed", "size", "split", "calls", "bare", "order_calls"))
    size = url.integer("size", 1024, least=1, most=100_000)
    split = url.choice("split", "train", SPLITS)
    return ToolTask(
        questions=_plainly(url, split, size),
        traces=1,
        calls=url.share("calls", 1.0),
        bare=url.share("bare", 0.0),
        order_calls=url.share("order_calls", 1.0),
    )


def _plainly(url: TaskUrl, split: str, size: int) -> ArithmeticQuestions:
    """Questions without operands."""
    seed = url.integer("seed", 0, least=0, most=_SEEDS)
    return ArithmeticQuestions(digits=0, least=0, seed=seed, split=split, size=size)


def read_gym(url: TaskUrl) -> tuple[int, int]:
    """Size and seed; the task's own keys are known only where its package is."""
    if not url.name:
        raise url.error("no task is named", "write reasoning_gym://TASK")
    size = url.integer("size", _GYM_SIZE, least=1, most=_MOST_TASKS)
    return size, url.integer("seed", 0, least=0, most=_SEEDS)


def read_hub(url: TaskUrl) -> Mapping[str, str]:
    """Split, config and revision, where they are given."""
    url.refuse_unknown(HUB_KEYS)
    if not url.name:
        raise url.error("no dataset is named", "write hf://OWNER/NAME")
    return url.query


_READERS: dict[str, Callable[[TaskUrl], Any]] = {
    "arithmetic": read_arithmetic,
    "tools": read_tool_task,
    "reasoning_gym": read_gym,
    "hf": read_hub,
}
"""Scheme -> parser of its addresses."""
