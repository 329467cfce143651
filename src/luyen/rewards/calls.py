"""Calls of reward functions as data, their outcomes, and executors of this and another process.

An outcome is numbers, a fault, or a value that is no score. Counted are requests, retries, faults
and cache hits, and seconds per rollout. Scoring functions may be third-party
code: rules, verifiers, functions of the user.
"""

import asyncio
import inspect
import math
import threading
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from importlib import import_module
from numbers import Complex, Real
from time import perf_counter
from typing import Any, Protocol, SupportsComplex, SupportsFloat, cast, final

from luyen.base.boundary import (
    MOST_ABANDONED,
    abandoned_count,
    boundary,
    last_line,
    own_copy,
    plain_text,
)
from luyen.base.errors import UserError
from luyen.base.heartbeat import beat
from luyen.base.records import Rollout, Score
from luyen.rewards.rules.all import rule_rewards
from luyen.rewards.rules.rule import Unscorable
from luyen.rewards.user_functions import called_as_ours, load_function, load_module
from luyen.telemetry.metrics import metric

# What a step's calls took: requests, retries, faults and cache hits, and time per rollout.

metric("judging/requests", doc="Requests to judges, retries included.")
metric("judging/retries", doc="Requests to judges that were made again after one that failed.")
metric("judging/faults/<kind>", doc="Scores that no judge gave, by the name of the last fault.")
metric("judging/cache_hits", doc="Scores found in the cache, and not computed.")
metric("judging/cache_misses", doc="Scores looked up in the cache, and not found.")
metric(
    "judging/unjudgeable/<rule>",
    doc="Answers that a rule ran out of time, memory or stack on, or broke: counted as wrong.",
)
metric(
    "judging/cache_damaged",
    doc="Entries of the cache that are not as they were written; they are recomputed.",
)


@final
class ScoringCounters:
    """Numbers by metric name since they were last taken; any thread may add.

    Example:
        >>> counts = ScoringCounters()
        >>> counts.add("judging/requests")
        >>> counts.add("judging/requests")
        >>> counts.take(), counts.take()
        ({'judging/requests': 2.0}, {})
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: Counter[str] = Counter()

    def add(self, name: str) -> None:
        """Count one more."""
        with self._lock:
            self._found[name] += 1

    def take(self) -> dict[str, float]:
        """What was counted since the last time."""
        with self._lock:
            found, self._found = self._found, Counter()
        return {name: float(count) for name, count in sorted(found.items())}


# Scoring time of each rollout, collected from every place that scores.

Key = tuple[int, int, str, int]
_spent: ContextVar[dict[Key, float] | None] = ContextVar("spent", default=None)


@contextmanager
def measuring() -> Iterator[dict[Key, float]]:
    """Seconds by the key of a rollout, for all scoring started inside."""
    seconds: dict[Key, float] = {}
    token = _spent.set(seconds)
    try:
        yield seconds
    finally:
        _spent.reset(token)


def add_time(rollout: Rollout, seconds: float) -> None:
    """Count seconds towards a rollout, if anybody measures."""
    spent = _spent.get()
    if spent is not None:
        spent[rollout.key] = spent.get(rollout.key, 0.0) + seconds


_SHOWN = 200


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOutcome:
    """The result of one call. Exactly one of `numbers`, `error` and `refused` is set.

    Example:
        >>> outcome_of(True, seconds=0.0).numbers
        {'score': 1.0}
        >>> outcome_of({"score": 0.5, "acc": 1, "pred": "42"}, seconds=0.0).numbers
        {'score': 0.5, 'acc': 1.0}
        >>> outcome_of(None, seconds=0.0).refused
        'None'
    """

    numbers: Mapping[str, float] | None = None
    """`score`, and every other number that was returned with it."""
    tree: Score | None = None
    """Where a `Score` was returned: the same, with its parts and turns."""
    error: str | None = None
    """Why nothing was returned: the exception, the timeout, the death of a process."""
    refused: str | None = None
    """What was returned, where it is no score."""
    is_unscorable: bool = False
    """Whether the error is that the rule cannot score the row, whatever the answer is."""
    is_dead: bool = False
    """Whether the error is that the process died for an unknown reason."""
    is_stand_in: bool = False
    """Whether the number stands for an answer that the rule could not score."""
    seconds: float = 0.0
    """How long the call took."""


def outcome_of(returned: Any, *, seconds: float) -> ScoreOutcome:
    """Numbers out of what a function returned: a number, a `Score`, or a mapping with `score`.

    What was returned is foreign code, too: reading it may raise. The outcome holds none of it, only
    plain numbers and text.
    """
    faults: list[BaseException] = []
    with boundary(faults):
        return replace(_read(returned), seconds=seconds)
    refused = f"{_kind(returned)} that cannot be read: {last_line(faults[0])}"
    return ScoreOutcome(refused=refused, seconds=seconds)


def fault_of(faults: Sequence[BaseException], *, seconds: float = 0.0) -> ScoreOutcome:
    """The outcome of a call that raised."""
    fault = faults[0]
    is_unscorable = isinstance(fault, Unscorable)
    error = plain_text(str(fault)) if is_unscorable else last_line(fault)
    return ScoreOutcome(error=error, is_unscorable=is_unscorable, seconds=seconds)


def _read(returned: Any) -> ScoreOutcome:
    if isinstance(returned, Score):
        tree = plain_score(returned)
        if tree is None or tree.value is None or not _is_whole(tree):
            return ScoreOutcome(refused=short_repr(returned))
        return ScoreOutcome(numbers={"score": tree.value}, tree=tree)
    if not isinstance(returned, Mapping):
        number = finite(returned)
        return (
            ScoreOutcome(refused=short_repr(returned)) if number is None else _numbers(score=number)
        )
    given = dict(cast(Mapping[Any, Any], returned))
    read = {plain_text(str(n)): finite(v) for n, v in given.items() if not isinstance(v, str)}
    numbers = {name: value for name, value in read.items() if value is not None}
    if "score" not in numbers or len(numbers) < len(read):
        return ScoreOutcome(refused=short_repr(given))
    return _numbers(**numbers)


def _numbers(**numbers: float) -> ScoreOutcome:
    return ScoreOutcome(numbers=numbers)


def plain_score(score: Any) -> Score | None:
    """The same tree, of numbers and text of Python's own; None where one of them is something else.

    A node without a value keeps its error.
    """
    if not isinstance(score, Score):
        return None
    value, weight, raw = finite(score.value), finite(score.weight), finite(score.raw)
    parts = [plain_score(part) for part in score.parts]
    turns = [(t if isinstance(t, int) else None, finite(share)) for t, share in score.by_turn]
    sound = tuple(part for part in parts if part is not None)
    by_turn = tuple((int(t), s) for t, s in turns if t is not None and s is not None)
    is_lost = value is None and score.value is not None
    is_lost |= not math.isfinite(sum(abs(share) for _, share in by_turn))
    if weight is None or is_lost or len(sound) < len(parts) or len(by_turn) < len(turns):
        return None
    return Score(
        name=plain_text(str(score.name)),
        value=value,
        weight=weight,
        parts=sound,
        error=None if score.error is None else plain_text(str(score.error)),
        by_turn=by_turn,
        raw=raw,
        gated=bool(score.gated),
        combine=plain_text(str(score.combine)),
        turned=bool(score.turned),
        seconds=finite(score.seconds),
        reply=None if score.reply is None else plain_text(str(score.reply)),
    )


def _is_whole(score: Score) -> bool:
    return score.value is not None and all(map(_is_whole, score.parts))


def finite(value: Any) -> float | None:
    """The value as a float; None when it is no real number, or not a finite one."""
    is_plain = isinstance(value, float | int)
    if not is_plain and (isinstance(value, str) or not isinstance(value, SupportsFloat)):
        return None
    if not is_plain and isinstance(value, SupportsComplex) and not isinstance(value, Real):
        with suppress(TypeError, ValueError, OverflowError, RuntimeError):
            if isinstance(value, Complex) or complex(value).imag:  # it would be dropped
                return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # arrays, tensors, huge integers
        return None
    return number if math.isfinite(number) else None


def short_repr(value: Any) -> str:
    """A value as a message shows it, never longer than a few lines; its `__repr__` may raise."""
    text = ""
    with boundary([]):
        text = plain_text(repr(value))
    text = text or f"{_kind(value)} that cannot be printed"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _kind(value: Any) -> str:
    name = type.__dict__["__name__"].__get__(type(value))  # a metaclass may have one of its own
    return f"a {plain_text(name)}"


FILE_FIELD = "reward.custom_reward_function"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreCall:
    """Which function to call, and with what.

    Example:
        >>> ScoreCall(name="score", source="reward.py", arguments={"solution_str": "4"}).rule
        False
    """

    name: str
    """A function of the file, or a registered rule."""
    source: str | None
    """File that defines it; None for what comes with the package."""
    rule: bool = False
    """Whether the name is looked up among the registered rules."""
    arguments: Mapping[str, Any]
    """Keyword arguments."""


class Executor(Protocol):
    """Makes calls, somewhere."""

    async def run(self, calls: Sequence[ScoreCall]) -> list[ScoreOutcome]:
        """What came of each call, in order."""
        ...


@cache
def function_of(name: str, source: str | None, rule: bool) -> Callable[..., Any]:
    """The function behind a call, with what it needs imported."""
    if not rule:
        assert source is not None, "a function that is no rule comes from a file"
        return called_as_ours(load_function(source, name, field=FILE_FIELD))
    if source is not None:
        load_module(source, field="trainer.plugins")
    door = rule_rewards.facts(name).get("door")
    if door is not None:
        import_module(door)
    return rule_rewards.get(name)


def perform(call: ScoreCall) -> ScoreOutcome:
    """Make a call on this thread, where no event loop runs."""
    faults: list[BaseException] = []
    returned: Any = None
    start = perf_counter()
    with boundary(faults):
        returned = function_of(call.name, call.source, call.rule)(**call.arguments)
        if inspect.isawaitable(returned):
            returned = asyncio.run(_awaited(returned))
    seconds = perf_counter() - start
    if faults:
        return fault_of(faults, seconds=seconds)
    return outcome_of(returned, seconds=seconds)


async def _awaited(waiting: Awaitable[Any]) -> Any:
    return await waiting


@final
class InlineExecutor:
    """Makes calls one after the other on the calling thread; a coroutine has a time limit."""

    def __init__(self, *, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    async def run(self, calls: Sequence[ScoreCall]) -> list[ScoreOutcome]:
        """What came of each call, in order."""
        return [await self._one(call) for call in calls]

    async def _one(self, call: ScoreCall) -> ScoreOutcome:
        start = perf_counter()
        function = function_of(call.name, call.source, call.rule)
        is_ours = function.__module__.startswith("luyen.")
        arguments = call.arguments if is_ours else own_copy(call.arguments)
        fault, returned = await attempt(function, arguments, timeout_s=self._timeout_s)
        beat()
        seconds = perf_counter() - start
        if fault is not None:
            return replace(fault, seconds=seconds)
        return outcome_of(returned, seconds=seconds)


async def attempt(
    function: Callable[..., Any], arguments: Mapping[str, Any], *, timeout_s: float
) -> tuple[ScoreOutcome | None, Any]:
    """The fault of a call, if any, and what it returned; a coroutine gets a limited time.

    A coroutine that goes on after its time, although it was cancelled, is not waited for.
    """
    _refuse_more_abandoned(timeout_s)
    faults: list[BaseException] = []
    returned: Any = None
    is_waiting = False
    with boundary(faults):
        returned = function(**arguments)
        # Looking at what came back runs code of the reward, too: `__class__` may be a property.
        is_waiting = inspect.isawaitable(returned)
    if is_waiting and not faults:
        task = asyncio.ensure_future(_contained(returned, faults))
        try:
            await asyncio.wait({task}, timeout=timeout_s)
        finally:
            task.cancel()
        if not task.done():
            return ScoreOutcome(error=f"no score within {timeout_s:g} s (reward.timeout_s)"), None
        if task.cancelled():
            faults.append(RuntimeError("the coroutine cancelled itself"))
        returned = None if faults else task.result()
    return (fault_of(faults) if faults else None), returned


async def _contained(waiting: Awaitable[Any], faults: list[BaseException]) -> Any:
    """What a coroutine returns; what it raises must not leave its task and end the event loop."""
    with boundary(faults):
        return await waiting


def _refuse_more_abandoned(timeout_s: float) -> None:
    if abandoned_count() >= MOST_ABANDONED:
        why = f"{MOST_ABANDONED} coroutines of the reward went on after their time was up and they"
        fix = "do not catch asyncio.CancelledError in the reward, or set reward_manager.name=prime"
        raise UserError("reward.timeout_s", timeout_s, f"{why} were cancelled", fix)


# Failures caused by the answer become a score; failures of the rule become a fault.
#
# A rule that says what a wrong answer is worth (`wrong=` where it is registered) may run out of
# time, memory or stack on an answer, or raise. If it scores an empty answer to the same row,
# the answer was the cause, and it is a wrong one. If it cannot even do that, nothing can be
# said about the answer.


@final
class FallbackExecutor:
    """Makes calls; where an answer is what a rule failed on, its score is that of a wrong one."""

    def __init__(self, inner: Executor, counts: ScoringCounters) -> None:
        self._inner = inner
        self._counts = counts

    async def run(self, calls: Sequence[ScoreCall]) -> list[ScoreOutcome]:
        """What came of each call, in order."""
        outcomes = await self._inner.run(calls)
        pairs = zip(calls, outcomes, strict=True)
        return await asyncio.gather(*(self._resolved(call, outcome) for call, outcome in pairs))

    async def _resolved(self, call: ScoreCall, outcome: ScoreOutcome) -> ScoreOutcome:
        facts = rule_rewards.facts(call.name) if call.rule else {}
        if outcome.error is None or outcome.is_unscorable or "wrong" not in facts:
            return outcome
        if outcome.is_dead:  # something else on the machine may have ended the process
            [outcome] = await self._inner.run([call])
            if outcome.error is None or outcome.is_unscorable:
                return outcome
        [empty] = await self._inner.run([without_answer(call)])
        if empty.is_unscorable:
            return replace(empty, seconds=outcome.seconds)
        if empty.numbers is None:
            error = f"{outcome.error}; for an empty answer: {empty.error or empty.refused}"
            return replace(outcome, error=error)
        self._counts.add(f"judging/unjudgeable/{call.name}")
        score = fallback_score(facts, call.arguments)
        return ScoreOutcome(numbers={"score": score}, is_stand_in=True, seconds=outcome.seconds)


def fallback_score(facts: Mapping[str, Any], arguments: Mapping[str, Any]) -> float:
    """What an answer is worth that the rule could not score: `wrong`, and so much for each call.

    Example:
        >>> fallback_score({"wrong": 0.0}, {})
        0.0
    """
    rollout = arguments.get("rollout")
    calls = len(rollout.calls) if isinstance(rollout, Rollout) else 0
    return float(facts["wrong"]) + calls * float(facts.get("wrong_per_call", 0.0))


def without_answer(call: ScoreCall) -> ScoreCall:
    """The same call about an answer that says nothing."""
    given = dict(call.arguments)
    if "answer" in given:
        given["answer"] = replace(given["answer"], text="", response_length=0)
    if "rollout" in given:
        given["rollout"] = replace(given["rollout"], text="", calls=(), messages=(), given=())
    return replace(call, arguments=given)
