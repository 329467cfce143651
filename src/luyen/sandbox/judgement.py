"""What assertions say about plain data, worked out outside the sandbox.

Comparisons, arithmetic and a few functions: nothing of a program is here but values that
`luyen.sandbox.inside.plain` read, so no operator and no function can be one of its own.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

_LARGEST = 10**6
"""Most bits of a power, and most entries of a repetition or a range."""
_MOST_DIGITS = 1000
"""Most digits to round to: Python writes out ten to their power."""

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Is: operator.is_, ast.IsNot: operator.is_not,
    ast.In: lambda a, b: _holds(b, a), ast.NotIn: lambda a, b: not _holds(b, a),
}  # fmt: skip
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.Not: operator.not_, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs, "len": len, "sorted": sorted, "set": set, "frozenset": frozenset, "list": list,
    "tuple": tuple, "dict": dict, "sum": sum, "min": min, "max": max, "round": round, "bool": bool,
    "float": float, "isclose": math.isclose, "range": range, "isinstance": isinstance,
    "int": int, "str": str, "complex": complex, "bytes": bytes,
}  # fmt: skip
"""Built-in functions that a check may call, and `isclose` of the module `math`."""
_TYPES = {"int", "float", "str", "bool", "list", "tuple", "dict", "set", "frozenset", "complex"}


_CONSTANTS = {"pi": math.pi, "e": math.e, "tau": math.tau, "inf": math.inf}


def is_true(check: ast.expr, values: Mapping[str, Any]) -> bool:
    """Whether a check holds for these values; what it raises says why it cannot."""
    return bool(_value(check, values))


def is_supported(check: ast.AST) -> bool:
    """Whether `is_true` knows every part of an expression."""
    match check:
        case ast.Constant():
            return True
        case ast.Name(id=name):
            return name.startswith("value_") or name in _TYPES
        case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
            return all(map(is_supported, items))
        case ast.Dict(keys=keys, values=values):
            return all(one is not None and is_supported(one) for one in [*keys, *values])
        case ast.UnaryOp(op=op, operand=operand):
            return type(op) in _UNARY and is_supported(operand)
        case ast.BinOp(op=op, left=left, right=right):
            known = isinstance(op, ast.Add | ast.Sub | ast.Mult | ast.Div | ast.Pow)
            return known and is_supported(left) and is_supported(right)
        case ast.Compare(left=left, ops=ops, comparators=others):
            return all(type(op) in _COMPARISONS for op in ops) and all(
                map(is_supported, [left, *others])
            )
        case ast.Attribute(value=ast.Name(id="math"), attr=name):
            return name in _CONSTANTS
        case ast.Subscript(value=inner, slice=index):
            return is_supported(inner) and is_supported(index)
        case ast.Call(func=function, args=args, keywords=keywords):
            given = [*args, *(keyword.value for keyword in keywords)]
            named = all(keyword.arg is not None for keyword in keywords)
            return _function(function) is not None and named and all(map(is_supported, given))
        case _:
            return False


def _function(node: ast.expr) -> Callable[..., Any] | None:
    match node:
        case ast.Name(id=name):
            return FUNCTIONS.get(name)
        case ast.Attribute(value=ast.Name(id="math"), attr="isclose"):
            return math.isclose
        case _:
            return None


def _value(node: ast.AST | None, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return values[name] if name in values else FUNCTIONS[name]
        case ast.List(elts=items):
            return [_value(item, values) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_value(item, values) for item in items)
        case ast.Set(elts=items):
            return {_value(item, values) for item in items}
        case ast.Dict(keys=keys, values=entries):
            pairs = zip(keys, entries, strict=True)
            return {_value(key, values): _value(entry, values) for key, entry in pairs}
        case ast.UnaryOp(op=op, operand=operand):
            return _UNARY[type(op)](_value(operand, values))
        case ast.BinOp(op=op, left=left, right=right):
            return _arithmetic(op, _value(left, values), _value(right, values))
        case ast.Compare(left=left, ops=ops, comparators=others):
            return _compared(_value(left, values), ops, [_value(one, values) for one in others])
        case ast.Attribute(attr=name):
            return _CONSTANTS[name]
        case ast.Subscript(value=inner, slice=index):
            return _value(inner, values)[_value(index, values)]
        case ast.Call(func=function, args=args, keywords=keywords):
            called = _function(function)
            assert called is not None
            named = {str(word.arg): _value(word.value, values) for word in keywords}
            return _called(called, [_value(one, values) for one in args], named)
        case _:
            raise AssertionError(f"{node} was not refused")


def _called(function: Callable[..., Any], given: list[Any], named: dict[str, Any]) -> Any:
    """The result of a function whose size has a bound."""
    if function is not range and any(isinstance(g, range) and g[_LARGEST:] for g in given):
        raise ValueError("a range of so many entries")
    if function is bytes and any(isinstance(one, int) and one > _LARGEST for one in given):
        raise ValueError("so many bytes")
    digits = [*given[1:], *named.values()] if function is round else []
    if any(isinstance(one, int) and abs(one) > _MOST_DIGITS for one in digits):
        raise ValueError("a number of so many digits")
    return function(*given, **named)


def _holds(container: Any, value: Any) -> bool:
    """Whether a container has a value; a range would try each of its numbers for some."""
    if not isinstance(container, range) or isinstance(value, int):
        return value in container
    return isinstance(value, float) and value.is_integer() and int(value) in container


def _compared(left: Any, ops: list[ast.cmpop], others: list[Any]) -> bool:
    for op, right in zip(ops, others, strict=True):
        if not _COMPARISONS[type(op)](left, right):
            return False
        left = right
    return True


def _arithmetic(op: ast.operator, left: Any, right: Any) -> Any:
    """The result of an operation whose size has a bound."""
    sizes = [len(one) for one in (left, right) if isinstance(one, str | bytes | list | tuple)]
    numbers = [abs(one) for one in (left, right) if isinstance(one, int)]
    if isinstance(left, Fraction) and isinstance(op, ast.Pow):
        numbers.insert(0, max(abs(left.numerator), left.denominator))
    match op:
        case ast.Add():
            return left + right
        case ast.Sub():
            return left - right
        case ast.Div():
            return left / right
        case ast.Mult():
            if sizes and numbers and sizes[0] * numbers[0] > _LARGEST:
                raise ValueError("a repetition of so many entries")
            return left * right
        case _:
            if len(numbers) == 2 and numbers[0].bit_length() * numbers[1] > _LARGEST:
                raise ValueError("a power of so many digits")
            return left**right
