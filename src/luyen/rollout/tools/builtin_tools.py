"""Built-in tools: a calculator, sandboxed Python, and search in a local collection.

Integers are exact, and a division that comes out even gives an integer. Other numbers are floats,
shown with twelve digits. What cannot be computed is an error that says why: a division by zero, a
number with more than a thousand digits, anything that is no arithmetic.
"""

import ast
import json
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast, final

from luyen.base.errors import UserError, did_you_mean
from luyen.base.input_files import expanded, require_file
from luyen.rollout.tools.protocol import builtin_tools
from luyen.rollout.tools.python_tools import FunctionTool
from luyen.rollout.tools.user_code import ToolError, one_line
from luyen.sandbox.launch import Limits
from luyen.sandbox.python import ProgramResult, run_python

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
    return evaluate(expression)


def evaluate(expression: str) -> str:
    """The value of an expression as text; ToolError says why it has none.

    Example:
        >>> evaluate("123 * (45 - 6)"), evaluate("7 / 2"), evaluate("2^10"), evaluate("0.1+0.2")
        ('4797', '3.5', '1024', '0.3')
        >>> evaluate("1 / 0")
        Traceback (most recent call last):
        ...
        luyen.rollout.tools.user_code.ToolError: division by zero
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


# The `python` tool: code of the policy, run in the sandbox.

_SPARE_S = 20.0
"""Time of a call beyond that of its program, so that the sandbox is the one that ends it."""
_LAST = 2000
"""Last characters of standard error that are shown."""


@builtin_tools.register("python")
def python_tool(*, name: str = "python", **limits: Any) -> FunctionTool:
    """The tool; `limits` are fields of `luyen.sandbox.launch.Limits`."""
    known = Limits.__slots__
    for given in limits:
        if given not in known:
            raise UserError(
                "config", given, "the sandbox has no such limit", did_you_mean(given, known)
            )
    sandbox_limits = Limits(**limits)

    async def python(code: str) -> str:
        """Run Python code and read what it prints and the value of its last line.

        Args:
            code: A whole program. Nothing is kept between calls.
        """
        return program_output(await run_python(code, limits=sandbox_limits))

    own = {"timeout_s": sandbox_limits.wall_s + _SPARE_S, "concurrency": 8}
    return FunctionTool(python, name=name, limits=own)


def program_output(ran: ProgramResult) -> str:
    """The output of a program for the policy; ToolError when it was killed.

    An exception inside the program is a result like any other: its traceback is shown.
    """
    if ran.killed_for is not None or ran.timed_out:
        raise ToolError(f"the program was ended: it went over its limit of {ran.killed_for}")
    parts = [ran.stdout.rstrip("\n"), ran.value or ""]
    if ran.exit_code != 0:
        parts.append(ran.stderr.strip()[-_LAST:] or f"exit code {ran.exit_code}")
    return "\n".join(part for part in parts if part) or "(no output)"


# The `search` tool: a local collection, searched by words or by exact key. The order of results
# depends on the collection and the query alone.

_WORD = re.compile(r"\w+")
_K1, _B = 1.2, 0.75
_NOTHING = "Nothing was found."


@builtin_tools.register("search")
def search_tool(
    *,
    path: str | None = None,
    documents: Mapping[str, str] | None = None,
    key_field: str = "title",
    text_field: str = "text",
    mode: Literal["words", "key"] = "words",
    top_k: int = 3,
    name: str = "search",
    description: str = "Search a collection of texts.",
) -> FunctionTool:
    """The tool over a JSONL file, or over documents written in the tool file.

    `words` ranks texts by the words they share with the query (BM25); `key` gives the text of
    exactly this key, upper and lower case alike.
    """
    if (path is None) == (documents is None):
        why = "a search needs either a file or documents"
        raise UserError("config.path", path, why, "set `path`, or `documents: {KEY: TEXT}`")
    if mode not in ("words", "key"):
        raise UserError("config.mode", mode, "no such way to search", "set `words` or `key`")
    if top_k < 1:
        raise UserError("config.top_k", top_k, "nothing would ever be found", "set it to 1 or more")
    if not isinstance(cast(object, documents), Mapping | None):
        raise UserError("config.documents", documents, "it is no mapping", "write {KEY: TEXT}")
    pairs = list((documents or {}).items())
    if path is not None:
        pairs = _read(path, key_field, text_field)
    texts = {str(key): str(text) for key, text in pairs}
    index = SearchIndex(list(texts.items())) if mode == "words" else None
    by_key = {_folded(key): text for key, text in texts.items()}

    async def search(query: str) -> str:
        if index is None:
            return by_key.get(_folded(query), _NOTHING)
        found = [
            f"[{i}] {key}: {text}" for i, (key, text) in enumerate(index.best(query, top_k), 1)
        ]
        return "\n".join(found) or _NOTHING

    search.__doc__ = description
    return FunctionTool(search, name=name)


@final
class SearchIndex:
    """Texts ranked by BM25 over key and text; ties keep the order of the collection.

    Example:
        >>> index = SearchIndex([("Rome", "Capital of Italy."), ("Paris", "Capital of France.")])
        >>> index.best("the capital of France", 1)
        [('Paris', 'Capital of France.')]
    """

    def __init__(self, texts: Sequence[tuple[str, str]]) -> None:
        self._texts = list(texts)
        counts = [Counter(_words(f"{key} {text}")) for key, text in texts]
        self._lengths = [counted.total() for counted in counts]
        self._mean = sum(self._lengths) / max(len(texts), 1) or 1.0
        self._where: dict[str, list[tuple[int, int]]] = {}
        for number, counted in enumerate(counts):
            for word, times in counted.items():
                self._where.setdefault(word, []).append((number, times))

    def best(self, query: str, most: int) -> list[tuple[str, str]]:
        """The texts that share words with the query, the best first."""
        scores: dict[int, float] = {}
        for word in sorted(set(_words(query))):
            found = self._where.get(word, [])
            rarity = math.log(1 + (len(self._texts) - len(found) + 0.5) / (len(found) + 0.5))
            for number, times in found:
                norm = _K1 * (1 - _B + _B * self._lengths[number] / self._mean)
                gain = rarity * times * (_K1 + 1) / (times + norm)
                scores[number] = scores.get(number, 0.0) + gain
        ranked = sorted(scores, key=lambda number: (-scores[number], number))
        return [self._texts[number] for number in ranked[:most]]


def _words(text: str) -> list[str]:
    return [word.casefold() for word in _WORD.findall(text)]


def _folded(key: str) -> str:
    return " ".join(key.casefold().split())


def _read(path: str, key_field: str, text_field: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    number = 0
    try:
        with require_file(expanded(path)).open(encoding="utf-8") as lines:
            for line in lines:
                number += 1
                if line.strip():
                    found.append(_pair(line, key_field, text_field))
    except (OSError, UnicodeDecodeError) as error:
        why = f"cannot be read: {error}"
        raise UserError("config.path", path, why, "give a readable JSONL file") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"line {number} is no object with `{key_field}` and `{text_field}`"
        fix = "fix the line, or set `key_field` and `text_field`"
        raise UserError("config.path", path, why, fix) from error
    return found


def _pair(line: str, key_field: str, text_field: str) -> tuple[str, str]:
    row: Any = json.loads(line)
    if not isinstance(row, dict):
        raise TypeError("no object")
    fields = cast(dict[str, Any], row)
    return str(fields[key_field]), str(fields[text_field])
