"""A calculator: arithmetic from a syntax tree, so that nothing else can be executed.

Integers are exact, and a division that comes out even gives an integer. Other numbers are floats,
shown with twelve digits. What cannot be computed is an error that says why: a division by zero, a
number with more than a thousand digits, anything that is no arithmetic.
"""

import ast
import math
import operator
import re
from collections.abc import Callable
from typing import Any

from luyen.rollout.tools.builtin import builtin_tools
from luyen.rollout.tools.foreign import ToolError, one_line
from luyen.rollout.tools.function import FunctionTool

_MOST_CHARACTERS = 1000
_MOST_BITS = 3400
"""About a thousand digits."""
_SIGNS = str.maketrans("\u00d7\u00b7\u00f7\u2212\u2013", "**/--")
"""Typographic signs of multiplication, division and subtraction."""
_WORDS = re.compile(
    r"\s*(?:(?P<number>(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?(?!\w))|(?P<name>[a-z]+)"
    r"|(?P<sign>[-+*/%^(),]))",
    re.ASCII,
)
_CONSTANTS = {"pi": math.pi, "e": math.e}
_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": abs,
    "ceil": math.ceil,
    "floor": math.floor,
    "max": max,
    "min": min,
    "round": lambda *given: _rounded(*given),
    "sqrt": math.sqrt,
}


@builtin_tools.register("calculator")
def calculator_tool(*, name: str = "calculator") -> FunctionTool:
    """The calculator as a tool, under another name if wanted."""
    return FunctionTool(_calculator, name=name)


async def _calculator(expression: str) -> str:
    """Evaluate arithmetic."""
    return evaluated(expression)


def evaluated(expression: str) -> str:
    """The value of an expression as text; ToolError says why it has none.

    Example:
        >>> evaluated("123 * (45 - 6)"), evaluated("7 / 2"), evaluated("2^10"), evaluated("0.1+0.2")
        ('4797', '3.5', '1024', '0.3')
        >>> evaluated("1 / 0")
        Traceback (most recent call last):
        ...
        luyen.rollout.tools.foreign.ToolError: division by zero
    """
    text = expression.translate(_SIGNS).strip()
    if len(text) > _MOST_CHARACTERS:
        raise ToolError(f"the expression has more than {_MOST_CHARACTERS} characters")
    _require_arithmetic(text)
    try:
        tree = ast.parse(text.replace("^", "**"), mode="eval")
        value = _value(tree.body)
    except SyntaxError as error:
        raise ToolError("the expression is not complete or not well formed") from error
    except ZeroDivisionError as error:
        raise ToolError("division by zero") from error
    except (RecursionError, MemoryError) as error:
        raise ToolError("the expression is nested too deeply") from error
    except (ValueError, OverflowError, TypeError) as error:
        raise ToolError(f"it has no value: {error}") from error
    return str(value) if isinstance(value, int) else f"{value:.12g}"


def _require_arithmetic(text: str) -> None:
    """Refuse anything but numbers, signs and known names, before Python's parser sees it."""
    at = 0
    while at < len(text):
        word = _WORDS.match(text, at)
        if word is None:
            raise ToolError(f"`{one_line(text[at : at + 10])}` is no arithmetic")
        name = word["name"]
        if name is not None and name not in _FUNCTIONS and name not in _CONSTANTS:
            known = ", ".join([*_FUNCTIONS, *_CONSTANTS])
            raise ToolError(f"there is no function `{name}`; known: {known}")
        at = word.end()
    if not text:
        raise ToolError("the expression is empty")


def _value(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return _bounded(value)
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATIONS:
            return _bounded(_OPERATIONS[type(sign)](_value(left), _value(right)))
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _bounded(_FUNCTIONS[name](*(_value(arg) for arg in args)))
        case _:
            raise ToolError("the expression is not complete or not well formed")


def _bounded(value: Any) -> int | float:
    if isinstance(value, complex):
        raise ToolError("the value is no real number")
    if isinstance(value, int):
        if value.bit_length() > _MOST_BITS:
            raise ToolError("the number has more than a thousand digits")
        return value
    if not math.isfinite(value):
        raise ToolError("the number is too large")
    return value


def _divided(a: float, b: float) -> int | float:
    if isinstance(a, int) and isinstance(b, int) and b != 0 and a % b == 0:
        return a // b
    return a / b


def _rounded(value: float, digits: int = 0) -> int | float:
    """The value rounded; Python would write out ten to the power of any number of digits."""
    if isinstance(digits, int) and digits < -_MOST_BITS:
        return 0
    return round(value, digits) if digits else round(value)


def _power(a: float, b: float) -> Any:
    if isinstance(a, int) and isinstance(b, int) and b > 0 and a.bit_length() * b > 2 * _MOST_BITS:
        if abs(a) > 1:
            raise ToolError("the number has more than a thousand digits")
        return a if b % 2 else abs(a)
    return a**b


_OPERATIONS: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divided,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: operator.mod,
    ast.Pow: _power,
}
