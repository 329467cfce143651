"""Outcome of one call of a scoring function: numbers, a fault, or a value that is no score.

Scoring functions may be third-party code: rules, verifiers, functions of the user.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from numbers import Complex, Real
from typing import Any, SupportsComplex, SupportsFloat, cast, final

from luyen.base.boundary import boundary, last_line, plain_text
from luyen.base.records import Score

_SHOWN = 200


@final
class Unscorable(Exception):
    """Raised by a rule that cannot score: the row lacks what it compares with, for instance."""


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
