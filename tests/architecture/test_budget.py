"""One file, one idea: files and functions have a length budget, and exceeding it needs a reason.

The length of a function is its code: the lines from `def` to its end, without its docstring.
"""

import ast

from tests.architecture.tree import functions, parsed, sources

FILE_LIMIT, FILE_CAP = 500, 800
FUNCTION_LIMIT, FUNCTION_CAP = 40, 80

EXCEPTIONS: dict[str, tuple[int, str]] = {
    "src/luyen/cli/eval.py::evaluate": (50, "an argument for each option, passed on by name"),
    "src/luyen/cli/serve.py::serve": (75, "an argument for each option, passed on by name"),
}
"""`path` or `path::function` -> (limit, reason). An entry that is no longer needed fails."""


def lengths(path: str, text: str) -> dict[str, int]:
    """Lines of the file under `path`, and of each of its functions under `path::name`."""
    found = {path: len(text.splitlines())}
    for name, node in functions(parsed(text)):
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        assert node.end_lineno is not None
        length = node.end_lineno - node.lineno + 1
        if ast.get_docstring(node) is not None:
            doc = node.body[0]
            assert doc.end_lineno is not None
            length -= doc.end_lineno - doc.lineno + 1
        found[f"{path}::{name}"] = max(length, found.get(f"{path}::{name}", 0))
    return found


def violations(found: dict[str, int], exceptions: dict[str, tuple[int, str]]) -> list[str]:
    """Everything longer than it may be, and every exception that excuses nothing."""
    problems: list[str] = []
    for name, length in found.items():
        limit, cap = (FUNCTION_LIMIT, FUNCTION_CAP) if "::" in name else (FILE_LIMIT, FILE_CAP)
        allowed = min(exceptions[name][0], cap) if name in exceptions else limit
        if length > allowed:
            problems.append(f"{name}: {length} lines, allowed {allowed}")
        if name in exceptions and length <= limit:
            problems.append(f"{name}: {length} lines need no exception: remove it")
    problems += [f"{name}: exception for nothing" for name in exceptions if name not in found]
    problems += [f"{name}: no reason" for name, (_, reason) in exceptions.items() if not reason]
    return problems


def test_every_file_and_function_keeps_its_budget():
    found: dict[str, int] = {}
    for path, text in sources("src/luyen", "tests", "examples"):
        found |= lengths(path, text)
    assert len(found) > 50
    assert violations(found, EXCEPTIONS) == []


def test_a_long_file_and_a_long_function_are_caught():
    body = "\n".join("    x = 1" for _ in range(40))
    text = f"def f():\n{body}\n" + "\n" * 460
    assert violations(lengths("a.py", text), {}) == [
        "a.py: 501 lines, allowed 500",
        "a.py::f: 41 lines, allowed 40",
    ]


def test_a_docstring_does_not_count_but_a_nested_function_does():
    doc = '    """One.\n\n    Two.\n    """\n'
    text = f"class C:\n  def f(self):\n{doc}    def g():\n      return 1\n    return g\n"
    assert lengths("a.py", text) == {"a.py": 9, "a.py::C.f": 4, "a.py::C.f.g": 2}


def test_an_exception_lifts_the_limit_only_to_the_cap():
    found = {"a.py": 650, "b.py": 801}
    exceptions = {"a.py": (650, "one table"), "b.py": (900, "one table")}
    assert violations(found, exceptions) == ["b.py: 801 lines, allowed 800"]
    assert violations({"a.py": 651}, {"a.py": (650, "one table")})


def test_a_stale_exception_and_one_without_a_reason_fail():
    assert violations({"a.py": 500}, {"a.py": (650, "one table")})
    assert violations({}, {"gone.py": (650, "one table")})
    assert violations({"a.py": 600}, {"a.py": (650, "")}) == ["a.py: no reason"]
