"""The program: run as the main module of a process, then the steps that follow it.

What leaves this process through the channel is what the program says of itself: it may have changed
everything here, so nothing that a judge relies on is decided here.
"""

import ast
import base64
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

from luyen.sandbox.inside import plain

MAIN = "main.py"
CHANNEL = 3
"""The descriptor through which values leave, one line of JSON each."""


def settle_in(job: dict[str, Any]) -> None:
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


def given_bytes(job: dict[str, Any]) -> int:
    """How much room `settle_in` takes, at least."""
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
            say(plain.write(found, most=most))
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
