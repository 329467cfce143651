"""A run is changed by its own commands only: no function writes into a run that it was given.

What a step computes travels as values between the calls of the loop. A module that could assign to
an attribute of a run, or change a container of one in place, would make the order of calls matter.
"""

import ast
from collections.abc import Iterator

import pytest

from tests.architecture.tree import functions, parsed, sources

RUNS = {"OnlineRun", "OfflineRun", "ReplayLearner", "StageRun"}
"""Types of runs; a parameter with one of them, or named `run`, is a run."""
IN_PLACE = {
    "add", "append", "clear", "discard", "extend", "insert", "remove", "reverse", "sort", "update",
}  # fmt: skip
"""Methods that change a list, a dict or a set and return nothing: a statement of their own."""
TAKING = {"pop", "popitem", "setdefault"}
"""Methods that change one and return an item."""
FOLDERS = ("src/luyen/train", "src/luyen/studio", "src/luyen/pipeline", "examples")


def runs_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """The parameters that are runs, by name."""
    arguments = function.args
    found = set[str]()
    for one in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
        types = ast.unparse(one.annotation) if one.annotation is not None else ""
        if one.arg == "run" or any(name in types for name in RUNS):
            found.add(one.arg)
    return found


def is_inside(node: ast.expr, names: set[str]) -> bool:
    """Whether an expression is an attribute or an item of a run, at any depth."""
    if not isinstance(node, ast.Attribute | ast.Subscript):
        return False
    below = node.value
    is_kept = (
        isinstance(below, ast.Attribute)
        and below.attr in ("run", "_run")
        and isinstance(below.value, ast.Name)
        and below.value.id == "self"
    )
    return is_kept or (isinstance(below, ast.Name) and below.id in names) or is_inside(below, names)


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement assigns to or deletes, the parts of a tuple one by one."""
    found: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        found = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For | ast.AsyncFor):
        found = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        found = [node.optional_vars]
    for target in found:
        yield from (n for n in ast.walk(target) if isinstance(n, ast.Attribute | ast.Subscript))


def is_change_in_place(node: ast.AST, names: set[str]) -> bool:
    """Whether a call changes a container of a run, or sets an attribute by name."""
    methods = TAKING
    if isinstance(node, ast.Expr):
        node, methods = node.value, IN_PLACE
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if isinstance(called, ast.Name) and called.id == "setattr" and node.args:
        first = node.args[0]
        return (isinstance(first, ast.Name) and first.id in names) or is_inside(first, names)
    return (
        isinstance(called, ast.Attribute)
        and called.attr in methods
        and is_inside(called.value, names)
    )


def writes(path: str, text: str) -> list[str]:
    """Every write into a run that a function was given, as `path::function: code`."""
    found: list[str] = []
    for name, function in functions(parsed(text)):
        assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        names = runs_of(function)
        for node in ast.walk(function):
            is_written = any(is_inside(target, names) for target in targets(node))
            if is_written or is_change_in_place(node, names):
                found.append(f"{path}::{name}: {ast.unparse(node)}")
    return found


def test_no_function_writes_into_a_run():
    found = [one for path, text in sources(*FOLDERS) for one in writes(path, text)]
    assert found == []


def test_there_are_functions_that_get_a_run():
    given = [
        name
        for _, text in sources(*FOLDERS)
        for name, function in functions(parsed(text))
        if isinstance(function, ast.FunctionDef) and runs_of(function)
    ]
    assert len(given) > 30


@pytest.mark.parametrize(
    "code",
    [
        "run.step = 1",
        "run.step += 1",
        "run.chain, other = 'a', 'b'",
        "run.notes['a'] = 0.5",
        "run.recorder.journals = None",
        "run.broken.append(1)",
        "run.data.rows.update(a=1)",
        "old = run.notes.pop('a')",
        "del run.journal",
        "for run.step in range(3): pass",
        "setattr(run, 'step', 1)",
        "with open('a') as run.file: pass",
    ],
)
def test_a_write_into_a_run_is_caught(code: str):
    assert writes("a.py", f"def f(run):\n    {code}\n")
    assert writes("a.py", f"def f(run: OnlineRun):\n    {code}\n")
    renamed = code.replace("run", "learner")
    assert writes("a.py", f"def f(learner: OnlineRun):\n    {renamed}\n")
    assert not writes("a.py", f"def f(learner):\n    {renamed}\n")


def test_a_run_that_an_object_keeps_is_not_written_to_either():
    kept = "class C:\n    def f(self):\n        self._run.step += 1\n"
    assert writes("a.py", kept) == ["a.py::C.f: self._run.step += 1"]


def test_commands_queries_and_a_runs_own_methods_are_allowed():
    code = """
class OnlineRun:
    def advance(self, progress):
        self._progress = progress

def f(run):
    run.advance(run.progress)
    run.roles.update_actor(run.data)
    metrics = run.schedule.update(run.step)
    notes = {}
    notes["a"] = run.step
    found = [run.step]
    found.append(1)
"""
    assert writes("a.py", code) == []
