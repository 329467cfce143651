"""What came of one call of a judging function: numbers, a fault, or something that is no score.

This is the boundary to code that may do anything: rules, verifiers, functions of the user.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, SupportsFloat, cast, final

from luyen.base.faults import last_line
from luyen.base.records import Score

_SHOWN = 200


@final
class Unscorable(Exception):
    """Raised by a rule that cannot judge: the row lacks what it compares with, for instance."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
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
    """`score`, and whatever other numbers were returned beside it."""
    tree: Score | None = None
    """Where a `Score` was returned: the same, with its parts and turns."""
    error: str | None = None
    """Why nothing was returned: the exception, the timeout, the death of a process."""
    refused: str | None = None
    """What was returned, where it is no score."""
    seconds: float = 0.0
    """How long the call took."""


def outcome_of(returned: Any, *, seconds: float) -> Outcome:
    """Numbers out of what a function returned: a number, a `Score`, or a mapping with `score`."""
    if isinstance(returned, Score):
        value = returned.value
        if value is None or not is_sound(returned):
            return Outcome(refused=shown(returned), seconds=seconds)
        return Outcome(numbers={"score": float(value)}, tree=returned, seconds=seconds)
    if not isinstance(returned, Mapping):
        number = finite(returned)
        if number is None:
            return Outcome(refused=shown(returned), seconds=seconds)
        return Outcome(numbers={"score": number}, seconds=seconds)
    given = cast(Mapping[Any, Any], returned)
    read = {str(name): finite(value) for name, value in given.items() if is_score(value)}
    numbers = {name: value for name, value in read.items() if value is not None}
    if "score" not in numbers or len(numbers) < len(read):
        return Outcome(refused=shown(dict(given)), seconds=seconds)
    return Outcome(numbers=numbers, seconds=seconds)


def is_sound(score: Score) -> bool:
    """Whether every number of a tree is finite, the shares of turns included."""
    numbers = [score.value, score.weight, *(share for _, share in score.by_turn)]
    turns = [turn for turn, _ in score.by_turn]
    is_finite = all(finite(x) is not None for x in numbers)
    return is_finite and all(isinstance(t, int) for t in turns) and all(map(is_sound, score.parts))


def is_score(value: Any) -> bool:
    """Whether a value beside the score must be a number; text is a note and is let go."""
    return not isinstance(value, str)


def finite(value: Any) -> float | None:
    """The value as a float; None when it is no number, or not a finite one."""
    is_plain = isinstance(value, float | int)
    if not is_plain and (isinstance(value, str) or not isinstance(value, SupportsFloat)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # arrays, tensors, huge integers
        return None
    return number if math.isfinite(number) else None


def shown(value: Any) -> str:
    """A value as a message shows it: never longer than a few lines."""
    try:
        text = repr(value)
    except ValueError:  # an integer with too many digits
        text = f"a {type(value).__name__} that cannot be printed"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


@contextmanager
def boundary(faults: list[str]) -> Iterator[None]:
    """Turn whatever judging code raises into a line in `faults`."""
    try:
        yield
    except Unscorable as fault:
        faults.append(str(fault))
    except Exception as fault:  # noqa: BLE001
        faults.append(last_line(fault))
