"""Assertions split: calls of the program run inside, what they return is evaluated outside.

`assert add(1, 2) == 3` becomes the expression `add(1, 2)`, whose value leaves the sandbox as plain
data, and a comparison with 3, which never enters it. An assertion that cannot be taken apart so has
to run in the program's interpreter, which can make it pass: its verdict is forgeable.
"""

import ast
import builtins
import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, final

from luyen.sandbox.python import Step

# Evaluation of assertions about plain data, outside the sandbox.
#
# Comparisons, arithmetic and a few functions: nothing of a program is here but values that
# `luyen.sandbox.child.program` read, so no operator and no function can be one of its own.

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
        case ast.Compare(left=left, ops=ops, comparators=rest):
            return all(type(op) in _COMPARISONS for op in ops) and all(
                map(is_supported, [left, *rest])
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
        case ast.Compare(left=left, ops=ops, comparators=rest):
            return _compared(_value(left, values), ops, [_value(one, values) for one in rest])
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


def _compared(left: Any, ops: list[ast.cmpop], rest: list[Any]) -> bool:
    for op, right in zip(ops, rest, strict=True):
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


_SHAPES = frozenset(
    ("len", "list", "tuple", "set", "frozenset", "dict", "sorted", "sum", "str", "repr")
)
"""Built-in functions that may run in the program's process on one of its values, if the result is
compared with a literal: to forge it, a program has to know that literal."""
_MAKERS = _SHAPES | {"range", "float", "int", "complex", "bytes", "reversed", "bool", "zip"}
_MAKERS |= {"min", "max", "abs", "round", "chr", "ord"}
"""Built-in functions that make an argument out of literals."""
_OUTSIDE = frozenset(dir(builtins)) | FUNCTIONS.keys() | {"math"}
"""Names that are not the program's, whatever it calls its own."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SplitTest:
    """A test whose verdict is found outside.

    Example:
        >>> judged = take_apart("assert add(1, 2) == 3")
        >>> judged.steps[0].code, ast.unparse(judged.checks[0])
        ('add(1, 2)', 'value_0 == 3')
    """

    steps: tuple[Step, ...]
    """What runs inside, in order: statements, and expressions whose values come out."""
    checks: tuple[ast.expr, ...]
    """Expressions over those values, `value_0`, `value_1`, ..., which must all be true."""


def take_apart(test: str) -> SplitTest | None:
    """The test as steps inside and checks outside; None where the program could forge its verdict.

    Example:
        >>> take_apart("assert all(add(i, 1) == i + 1 for i in range(9))") is None
        True
    """
    try:
        statements = _unrolled(ast.parse(test).body)
        return _Apart(statements).judged()
    except (_Inseparable, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


class _Inseparable(Exception):
    """A test of which some part has to be decided by the program's interpreter."""


@final
class _Apart:
    """The two halves of a test while they are collected."""

    def __init__(self, statements: list[ast.stmt]) -> None:
        self._statements = statements
        self._steps: list[Step] = []
        self._checks: list[ast.expr] = []
        self._inputs: set[str] = set()
        self._expected = _expected_names(statements)

    def judged(self) -> SplitTest:
        """Both halves of the whole test."""
        for statement in self._statements:
            match statement:
                case ast.Assert(test=test):
                    for part in _conjunction(test):
                        self._check(part)
                case ast.Import() | ast.ImportFrom():
                    self._steps.append(Step(code=ast.unparse(statement)))
                case ast.Expr(value=value) if self._is_of_program(value):
                    self._steps.append(Step(code=ast.unparse(statement)))
                case ast.Assign(targets=targets, value=value):
                    self._assign(statement, targets, value)
                case _:
                    raise _Inseparable
        if not self._checks:
            raise _Inseparable
        return SplitTest(steps=tuple(self._steps), checks=tuple(self._checks))

    def _assign(self, statement: ast.stmt, targets: list[ast.expr], value: ast.expr) -> None:
        names = {target.id for target in targets if isinstance(target, ast.Name)}
        if self._is_literal(value):
            if names & self._expected.keys():
                return  # only compared with: it stays outside
            self._inputs |= names
        elif not (self._is_of_program(value) or self._is_shape(value)):
            raise _Inseparable
        self._steps.append(Step(code=ast.unparse(statement)))

    def _check(self, test: ast.expr) -> None:
        before = len(self._sent())
        check = _Renamed(self._expected).visit(test)
        check = _Split(self).visit(check)
        # Two values of the program in one comparison could be made equal without being right.
        if len(self._sent()) - before > 1 or not is_supported(check):
            raise _Inseparable
        self._checks.append(check)

    def _sent(self) -> list[Step]:
        return [step for step in self._steps if step.is_value]

    def send(self, node: ast.expr) -> ast.expr:
        """Let the value of an expression come out; its name outside."""
        name = f"value_{len(self._sent())}"
        self._steps.append(Step(code=ast.unparse(node), is_value=True))
        return ast.Name(id=name, ctx=ast.Load())

    def is_value(self, node: ast.expr, *, is_equation: bool) -> bool:
        """Whether an expression is the program's to compute."""
        return self._is_of_program(node) or (is_equation and self._is_shape(node))

    def _is_shape(self, node: ast.expr) -> bool:
        match node:
            case ast.Call(func=ast.Name(id=name), args=[inner], keywords=[]) if name in _SHAPES:
                return self._is_of_program(inner) or self._is_shape(inner)
            case _:
                return False

    def _is_of_program(self, node: ast.expr) -> bool:
        """Whether an expression is a value of the program, or a call of it with given inputs."""
        match node:
            case ast.Name(id=name):
                return name not in _OUTSIDE
            case ast.Attribute(value=inner):
                return self._is_of_program(inner)
            case ast.Subscript(value=inner, slice=index):
                return self._is_of_program(inner) and self._is_literal(index)
            case ast.Call(func=function):
                return self._is_of_program(function) and all(map(self._is_literal, _inputs(node)))
            case _:
                return False

    def _is_literal(self, node: ast.expr) -> bool:
        """Whether an expression is made of literals, of built-in functions of them, and inputs."""
        match node:
            case ast.Constant():
                return True
            case ast.Name(id=name):
                return name in self._inputs
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Set(elts=items):
                return all(map(self._is_literal, items))
            case ast.Dict(keys=keys, values=values):
                return all(one is not None and self._is_literal(one) for one in [*keys, *values])
            case ast.UnaryOp(operand=operand):
                return self._is_literal(operand)
            case ast.BinOp(left=left, right=right):
                return self._is_literal(left) and self._is_literal(right)
            case ast.Call(func=ast.Name(id=name)):
                return name in _MAKERS and all(map(self._is_literal, _inputs(node)))
            case _:
                return False


@final
class _Split(ast.NodeTransformer):
    """Replaces what the program computes by the names of the values that come out."""

    def __init__(self, apart: _Apart) -> None:
        self._apart = apart

    def visit(self, node: ast.AST) -> Any:
        """The node, or the name of its value."""
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq):
            sides = [node.left, *node.comparators]
            sure = [isinstance(s, ast.Constant) and isinstance(s.value, bool) for s in sides]
            for i, side in enumerate(sides):
                if self._apart.is_value(side, is_equation=not any(sure)):
                    sides[i] = self._apart.send(side)
            node.left, node.comparators = self.visit(sides[0]), [self.visit(sides[1])]
            return node
        if isinstance(node, ast.Name) and node.id.startswith("value_"):
            return node
        if isinstance(node, ast.expr) and self._apart.is_value(node, is_equation=False):
            return self._apart.send(node)
        return super().visit(node)


@final
class _Renamed(ast.NodeTransformer):
    """Replaces names by expressions."""

    def __init__(self, after: dict[str, ast.expr]) -> None:
        self._after = after

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """What the name stands for; names that values have outside are not a test's to use."""
        if node.id.startswith("value_"):
            raise _Inseparable
        return self._after.get(node.id, node)


def _inputs(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _conjunction(test: ast.expr) -> list[ast.expr]:
    """The parts of `a and b and ...`, which must all hold."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return [part for value in test.values for part in _conjunction(value)]
    return [test]


def _expected_names(statements: list[ast.stmt]) -> dict[str, ast.expr]:
    """Names of literals that assertions compare with, and that nothing else uses."""
    values: dict[str, list[ast.expr]] = {}
    inside: set[str] = set()
    for statement in statements:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values.setdefault(name, []).append(value)
                inside |= _names(value)
            case ast.Assert(test=test):
                for node in ast.walk(test):
                    if isinstance(node, ast.Call | ast.Subscript):
                        inside |= _names(node)
            case _:
                inside |= _names(statement)
    plain = {name: found[0] for name, found in values.items() if len(found) == 1}
    return {n: v for n, v in plain.items() if n not in inside and is_supported(v) and not _names(v)}


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}


def _unrolled(body: list[ast.stmt]) -> list[ast.stmt]:
    """`def check(candidate): ...` with a call of it, as its body with the name that is checked."""
    body = [one for one in body if not _is_idle(one)]
    match body:
        case [*before, ast.Expr(value=ast.Call(func=ast.Name(id=called), args=[ast.Name() as by]))]:
            pass
        case _:
            return body
    function = next((one for one in before if isinstance(one, ast.FunctionDef)), None)
    if function is None or function.name != called or function.decorator_list:
        return body
    match function.args:
        case ast.arguments(posonlyargs=[], args=[only], vararg=None, kwonlyargs=[], kwarg=None):
            renamed = _Renamed({only.arg: by})
        case _:
            return body
    inner = [renamed.visit(one) for one in function.body if not _is_idle(one)]
    return [one for one in before if one is not function] + inner


def _is_idle(statement: ast.stmt) -> bool:
    """Whether a statement does nothing: `pass`, a docstring."""
    is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    return is_text or isinstance(statement, ast.Pass)
