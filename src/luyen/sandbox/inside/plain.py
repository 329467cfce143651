"""Plain data as text: how the value of a call leaves the sandbox.

`encode` runs beside the program, which may have changed anything there. `decode` runs outside and
makes nothing but numbers, text, bytes and collections of them, whatever it reads.
"""

import json
import numbers
from collections.abc import KeysView
from decimal import Decimal
from fractions import Fraction
from typing import Any

_DEEPEST = 100
_LONG = 2**63
_EXPONENT = 1000
_SHOWN = 200


class NotPlain(Exception):
    """A value that is no plain data; its text says what it is."""


def write(value: Any, *, most: int) -> str:
    """A value as one line of text of at most `most` characters, or what it is instead."""
    text = json.dumps(encode(value))
    return text if len(text) <= most else json.dumps({"long": len(text)})


def read(text: str) -> Any:
    """The value of a line; NotPlain says what it is where it is no plain data."""
    try:
        return decode(json.loads(text))
    except NotPlain:
        raise
    except (ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as fault:
        raise NotPlain(f"what it sent cannot be read ({type(fault).__name__})") from fault


def encode(value: Any, depth: int = 0) -> Any:
    """A value in the form of JSON; what JSON lacks is an object with one key that names it."""
    if depth > _DEEPEST:
        return {"object": "data nested too deeply"}
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, numbers.Number) or type(value).__module__ == "numpy":
        return _number(value)
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, list):
        return [encode(one, depth + 1) for one in value]
    if isinstance(value, tuple):
        return {"tuple": [encode(one, depth + 1) for one in value]}
    if isinstance(value, set | frozenset | KeysView):
        return {"set": [encode(one, depth + 1) for one in value]}
    if isinstance(value, dict):
        return {"dict": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]}
    return {"object": f"a {type(value).__name__}: {value!r:.{_SHOWN}}"}


def _number(value: Any) -> Any:
    if isinstance(value, Fraction):
        return {"fraction": [_number(value.numerator), _number(value.denominator)]}
    if isinstance(value, Decimal):
        return {"decimal": str(value)}
    if isinstance(value, numbers.Integral):
        whole = int(value)
        return whole if -_LONG < whole < _LONG else {"int": hex(whole)}
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, numbers.Complex):
        return {"complex": [complex(value).real, complex(value).imag]}
    if type(value).__name__ in ("bool", "bool_"):
        return bool(value)
    return {"object": f"a {type(value).__name__}: {value!r:.{_SHOWN}}"}


def decode(given: Any) -> Any:
    """The value of what `encode` made; ValueError and its like where it is something else."""
    if isinstance(given, list):
        return [decode(one) for one in given]
    if not isinstance(given, dict):
        return given
    ((kind, content),) = given.items()
    if kind in ("object", "long"):
        what = str(content)[:_SHOWN] if kind == "object" else f"{int(content)} characters of data"
        raise NotPlain(what)
    return _MAKERS[kind](content)


def _bounded(number: Decimal) -> Decimal:
    """A decimal number that is cheap to round and to compare: its exponent could be any."""
    if number.is_finite() and abs(number.adjusted()) > _EXPONENT:
        raise NotPlain("a decimal number beyond all bounds")
    return number


_MAKERS = {
    "int": lambda text: int(text, 16),
    "complex": lambda parts: complex(*map(float, parts)),
    "fraction": lambda parts: Fraction(*map(decode, parts)),
    "decimal": lambda text: _bounded(Decimal(text)),
    "bytes": bytes.fromhex,
    "tuple": lambda items: tuple(map(decode, items)),
    "set": lambda items: set(map(decode, items)),
    "dict": lambda items: {decode(key): decode(value) for key, value in items},
}
