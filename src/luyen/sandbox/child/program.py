"""The program, run as the main module of a process, and the plain values that its steps return.

What leaves this process through the channel is what the program says of itself: it may have changed
everything here, so nothing that a judge relies on is decided here.
"""

import ast
import base64
import json
import numbers
import os
import sys
import tempfile
import traceback
from collections.abc import KeysView
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

# Serialization of plain data: how the value of a call leaves the sandbox.
#
# `encode` runs in the program's process, where anything may have changed. `decode` runs outside
# and makes nothing but numbers, text, bytes and collections of them, whatever it reads.

_DEEPEST = 100
_LONG = 2**63
_EXPONENT = 1000
_SHOWN = 200


class NotPlain(Exception):
    """A value that is no plain data; its text says what it is."""


def write_plain(value: Any, *, most: int) -> str:
    """A value as one line of text of at most `most` characters, or what it is instead."""
    text = json.dumps(encode(value))
    return text if len(text) <= most else json.dumps({"long": len(text)})


def read_plain(text: str) -> Any:
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


MAIN = "main.py"
CHANNEL = 3
"""The descriptor through which values leave, one line of JSON each."""


def write_inputs(job: dict[str, Any]) -> None:
    """Write the files of the job into this directory, and give the program its standard input."""
    for name, data in job.get("files", {}).items():
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(data))
    Path(MAIN).write_text(job["code"], encoding="utf-8", errors="replace")
    with tempfile.TemporaryFile(dir=".") as given:
        given.write(job.get("stdin", "").encode(errors="replace"))
        given.seek(0)
        os.dup2(given.fileno(), 0)
    sys.stdin = open(0, encoding="utf-8", errors="replace")  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", errors="backslashreplace")  # noqa: SIM115


def input_bytes(job: dict[str, Any]) -> int:
    """How much room `write_inputs` takes, at least."""
    texts = [job["code"], job.get("stdin", ""), *job.get("files", {}).values()]
    return sum(len(text.encode(errors="replace")) for text in texts)


def run(job: dict[str, Any]) -> None:
    """Run the code, then its steps; what it raises ends this process like any interpreter.

    The channel gets a line for each step that asks for a value, and at the end one with the mark
    of this run and how the last expression of the code prints itself.
    """
    module = ModuleType(job.get("name", "__main__"))
    module.__file__ = MAIN
    sys.modules[module.__name__] = module
    sys.argv = [MAIN]
    sys.dont_write_bytecode = True
    sys.path.insert(0, os.getcwd())
    sys.excepthook = show
    steps, mark, most = job.pop("steps", []), job.pop("mark", ""), job["limits"]["output_bytes"]
    value = execute(job.pop("code").encode(errors="replace").decode(), MAIN, vars(module))
    for step in steps:
        code = step["code"].encode(errors="replace").decode()
        found = execute(code, "<test>", vars(module))
        if step["is_value"]:
            say(write_plain(found, most=most))
    shown = None if value is None else repr(value)
    if shown is not None and len(shown) > most:
        shown = f"{shown[:most]}... [{len(shown) - most} more characters were cut]"
    sys.stdout.flush()
    say(json.dumps({"mark": mark, "shown": shown}))


def say(line: str) -> None:
    """Write a line into the channel, all of it."""
    data = line.encode() + b"\n"
    while data:
        data = data[os.write(CHANNEL, data) :]


def execute(code: str, name: str, names: dict[str, Any]) -> Any:
    """Run code in these names; the value of the expression it ends with, None without one.

    Example:
        >>> execute("x = 6\\nx * 7", "<example>", {})
        42
    """
    tree = ast.parse(code, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(_compiled(tree, name, "exec"), names)
    if not isinstance(last, ast.Expr):
        return None
    return eval(_compiled(ast.Expression(last.value), name, "eval"), names)


def _compiled(tree: ast.Module | ast.Expression, name: str, mode: str) -> CodeType:
    return compile(tree, name, mode, dont_inherit=True)


def show(kind: type[BaseException], fault: BaseException, trace: TracebackType | None) -> None:
    """Print a traceback that begins where the program does."""
    first = trace
    while trace is not None and trace.tb_frame.f_code.co_filename not in (MAIN, "<test>"):
        trace = trace.tb_next
    is_syntax = isinstance(fault, SyntaxError)
    traceback.print_exception(kind, fault, trace if trace is not None or is_syntax else first)
