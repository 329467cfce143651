"""The program: run as the main module of a process, with the value of its last expression."""

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

MAIN = "main.py"


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


def run(job: dict[str, Any], said: int) -> None:
    """Run code, then what follows it; tell through `said` that the end was reached, and the value.

    What it raises ends this process as it would end any interpreter.
    """
    module = ModuleType(job.get("name", "__main__"))
    module.__file__ = MAIN
    sys.modules[module.__name__] = module
    sys.argv = [MAIN]
    sys.dont_write_bytecode = True
    sys.path.insert(0, os.getcwd())
    sys.excepthook = show
    value = execute(job["code"].encode(errors="replace").decode(), MAIN, vars(module))
    if "then" in job:
        execute(job["then"].encode(errors="replace").decode(), "<test>", vars(module))
    shown = None if value is None else repr(value)
    most: int = job["limits"]["output_bytes"]
    if shown is not None and len(shown) > most:
        shown = f"{shown[:most]}... [{len(shown) - most} more characters were cut]"
    sys.stdout.flush()
    os.write(said, json.dumps({"value": shown}).encode())


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
