"""What the knobs of the built-in rules may be: told before anything is scored.

A test holds the kinds equal to the annotations of the rules.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast, final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class KnobValue:
    """A kind of value, and its limit.

    Example:
        >>> KnobValue(kind="whole", least=1).words()
        'a whole number >= 1'
    """

    kind: str
    """whole, number, flag, text, texts, object, numbers by name, or one of `choices`."""
    least: float | None = None
    """Smallest number, or fewest letters of a text."""
    choices: tuple[str, ...] = ()
    """Words that it may be."""
    is_optional: bool = False
    """Whether it may be null."""

    def words(self) -> str:
        """The kind as a user would say it."""
        said = f"one of {', '.join(self.choices)}" if self.choices else _WORDS[self.kind]
        limit = f" >= {self.least:g}" if self.least is not None and self.kind != "text" else ""
        return f"{said}{limit}{' or null' if self.is_optional else ''}"

    def takes(self, value: object) -> bool:
        """Whether a value is of this kind and within its limit."""
        if value is None:
            return self.is_optional
        if self.choices:
            return value in self.choices
        return _TAKES[self.kind](value, -math.inf if self.least is None else self.least)


def _is_number(value: object, least: float) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and math.isfinite(cast(float, value)) and cast(float, value) >= least


def _are_texts(value: object, least: float) -> bool:  # noqa: ARG001 a list has no least
    return isinstance(value, list) and all(isinstance(v, str) for v in cast(list[Any], value))


def _are_numbers(value: object, least: float) -> bool:
    inner = cast(Mapping[str, object], value).values() if isinstance(value, Mapping) else [None]
    return all(_is_number(one, least) for one in inner)


_WORDS = {
    "whole": "a whole number",
    "number": "a number",
    "flag": "true or false",
    "text": "a text that is not empty",
    "texts": "a list of texts",
    "object": "a mapping",
    "numbers": "numbers by name",
}
_TAKES: dict[str, Callable[[object, float], bool]] = {
    "whole": lambda value, least: isinstance(value, int) and _is_number(value, least),
    "number": _is_number,
    "flag": lambda value, _: isinstance(value, bool),
    "text": lambda value, _: isinstance(value, str) and bool(value),
    "texts": _are_texts,
    "object": lambda value, _: isinstance(value, Mapping),
    "numbers": _are_numbers,
}
_NUMBER, _FLAG, _TEXTS = KnobValue(kind="number"), KnobValue(kind="flag"), KnobValue(kind="texts")


def _whole(least: int, *, is_optional: bool = False) -> KnobValue:
    return KnobValue(kind="whole", least=least, is_optional=is_optional)


def _one_of(*choices: str) -> KnobValue:
    return KnobValue(kind="choice", choices=choices)


KNOB_VALUES: dict[str, KnobValue] = {
    **dict.fromkeys(("strip", "ignore_case", "fenced", "secrets", "refuse_forgeable"), _FLAG),
    **dict.fromkeys(("at_zero", "at_limit", "without", "format_score"), _NUMBER),
    **dict.fromkeys(("per_call", "per_second", "per_character"), _NUMBER),
    **dict.fromkeys(("tolerance", "penalty_factor"), KnobValue(kind="number", least=0)),
    **dict.fromkeys(("required", "forbidden_tools", "canaries"), _TEXTS),
    **dict.fromkeys(("cpu_s", "memory_mb", "ngram", "buffer"), _whole(1)),
    **dict.fromkeys(("free", "float_rounding"), _whole(0)),
    **dict.fromkeys(("max_response_length", "longest_query"), _whole(1, is_optional=True)),
    **dict.fromkeys(("choices", "tag"), KnobValue(kind="text")),
    "allowed": _whole(0, is_optional=True),
    "when_cut": KnobValue(kind="number", is_optional=True),
    "prices": KnobValue(kind="numbers", is_optional=True),
    "schema": KnobValue(kind="object", is_optional=True),
    "credit": _one_of("all", "share"),
    "method": _one_of("strict", "flexible"),
    "mode": _one_of("strict", "loose"),
    "match": _one_of("full", "search"),
    "unit": _one_of("token", "word"),
}
"""Knob -> what it may be, in every rule of ours that has it. Patterns are read by W14."""
