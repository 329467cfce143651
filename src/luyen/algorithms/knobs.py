"""Knobs of a registered function: the keyword arguments it reads, under their config keys."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from luyen.base.errors import UserError
from luyen.base.suggest import did_you_mean

_NOT_KNOBS = frozenset({"seed"})


def knob_names(*functions: Callable[..., Any]) -> tuple[str, ...]:
    """Sorted names of the keyword-only arguments of the functions; a seed is not a knob.

    Example:
        >>> def loss(x: float, *, clip_ratio: float = 0.2, seed: int = 0) -> float:
        ...     return x
        >>> knob_names(loss)
        ('clip_ratio',)
    """
    names: set[str] = set()
    for function in functions:
        parameters = inspect.signature(function).parameters.values()
        names |= {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
    return tuple(sorted(names - _NOT_KNOBS))


def read_by(function: Callable[..., Any], knobs: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `knobs` that `function` reads."""
    names = knob_names(function)
    return {name: value for name, value in knobs.items() if name in names}


def require_known(owner: str, knobs: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise on the first knob that `owner` (such as "policy loss `gspo`") does not read."""
    names = sorted(known)
    for name in sorted(knobs):
        if name not in names:
            listed = ", ".join(names) if names else "none"
            why = f"{owner} has no such knob (it has: {listed})"
            fix = did_you_mean(name, names) if names else "remove it"
            raise UserError(name, knobs[name], why, fix)


def require_positive(name: str, value: float, *, above: float = 0.0) -> None:
    """Raise unless value > above; NaN is refused too."""
    if not value > above:
        raise UserError(
            name, value, f"it must be greater than {above:g}", f"set {name} > {above:g}"
        )


def require_not_negative(name: str, value: float) -> None:
    """Raise unless value >= 0; NaN is refused too."""
    if not value >= 0:
        raise UserError(name, value, "it must be 0 or more", f"set {name} >= 0")
