"""Names that say nothing and habits that hide faults do not enter the source."""

import ast
import re
from collections.abc import Iterator
from pathlib import PurePath

import pytest

from tests.architecture.tree import functions, parsed, sources

EXCEPTIONS: dict[str, str] = {
    "src/luyen/base/boundary.py::boundary: except Exception": (
        "code of others may raise anything; it becomes a fault that says what it was"
    ),
    "src/luyen/checkpoint/writer.py::BackgroundTask._carry_out: except Exception": (
        "it is raised again in the thread of the run"
    ),
    "src/luyen/telemetry/sinks.py::BackgroundSink._work: except Exception": (
        "whatever a remote service raises becomes one warning"
    ),
    "src/luyen/telemetry/sinks.py::BackgroundSink._carry_out: except Exception": (
        "whatever a remote service raises becomes one warning"
    ),
    "src/luyen/config/model_folder/chat_template_worker.py::reply: except Exception": (
        "a chat template may raise anything; it becomes the reason why there is no text"
    ),
    "src/luyen/base/boundary.py::library_faults: except Exception": (
        "files of strangers make libraries raise anything, panics included; it is a UserError"
    ),
}
"""`path::function: rule` -> reason, for the rules marked `may be excused`."""

EMPTY_NAMES = re.compile(r"(util|helper|manager|misc)s?", re.IGNORECASE)
EMPTY_CLASSES = re.compile(r"(Manager|Helper|Util)s?$")
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")
BLANKET = re.compile(r"#\s*(noqa|type:\s*ignore|pyright:\s*ignore)\s*($|[^\s:\[(])")


def is_interface(body: list[ast.stmt]) -> bool:
    """Whether a function body holds only a docstring and `...`."""
    return all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in body)


def bad_class(node: ast.ClassDef) -> bool:
    """Whether a class name says nothing, or it is a `Base*` with behaviour."""
    behaves = any(isinstance(n, ast.FunctionDef) and not is_interface(n.body) for n in node.body)
    base = re.match(r"_?Base(?![a-z])", node.name) is not None
    return EMPTY_CLASSES.search(node.name) is not None or (base and behaves)


def caught(handler: ast.ExceptHandler) -> str | None:
    """The rule an except clause breaks, if any."""
    if handler.type is None:
        return "bare except"
    names = [n.id for n in ast.walk(handler.type) if isinstance(n, ast.Name)]
    return "except Exception" if {"Exception", "BaseException"} & set(names) else None


def call_rule(node: ast.Call, path: str) -> str | None:
    """The rule a call breaks, if any."""
    if not isinstance(node.func, ast.Name):
        return None
    name = node.func.id
    if name == "getattr" and (len(node.args) > 2 or node.keywords):
        return "getattr with a default"
    if name == "print" and "/cli/" not in path:
        return "print outside cli"
    return name if name in ("hasattr", "__import__") else None


def rules_broken(node: ast.AST, path: str) -> str | None:
    """The rule that this node breaks, if any."""
    if isinstance(node, ast.Call):
        return call_rule(node, path)
    if isinstance(node, ast.ExceptHandler):
        return caught(node)
    if isinstance(node, ast.Name) and node.id == "NotImplementedError":
        return node.id
    if isinstance(node, ast.ClassDef) and bad_class(node):
        return f"class name {node.name}"
    return None


def findings(path: str, text: str) -> Iterator[str]:
    """`path::function: rule` for every rule that the file breaks."""
    if EMPTY_NAMES.fullmatch(PurePath(path).stem) or EMPTY_NAMES.fullmatch(
        PurePath(path).parent.name
    ):
        yield f"{path}: module name"
    for number, line in enumerate(text.splitlines(), 1):
        if UNFINISHED.search(line):
            yield f"{path}:{number}: unfinished"
        if BLANKET.search(line):
            yield f"{path}:{number}: blanket ignore"
    tree = parsed(text)
    broken = [(node, rule) for node in ast.walk(tree) if (rule := rules_broken(node, path))]
    if not broken:
        return
    owner: dict[ast.AST, str] = {}
    for name, function in functions(tree):
        owner |= dict.fromkeys(ast.walk(function), name)
    for node, rule in broken:
        yield f"{path}::{owner.get(node, '<module>')}: {rule}"


def violations(found: set[str], exceptions: dict[str, str]) -> list[str]:
    """Findings that nothing excuses, and excuses for nothing."""
    unexcused = [f for f in found if not exceptions.get(f)]
    return sorted(unexcused) + [f"excuse for nothing: {e}" for e in exceptions if e not in found]


def test_no_empty_name_and_no_hidden_fault_is_in_the_source():
    found = {finding for path, text in sources() for finding in findings(path, text)}
    assert violations(found, EXCEPTIONS) == []


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("def f(x):\n    return hasattr(x, 'y')", "hasattr"),
        ("def f(x):\n    return getattr(x, 'y', None)", "getattr with a default"),
        ("def f(x):\n    return __import__(x)", "__import__"),
        ("def f(x):\n    print(x)", "print outside cli"),
        ("def f(x):\n    raise NotImplementedError", "NotImplementedError"),
        ("def f(x):\n    raise NotImplementedError('later')", "NotImplementedError"),
        ("def f(x):\n    try:\n        x()\n    except:\n        pass", "bare except"),
        (
            "def f(x):\n    try:\n        x()\n    except Exception:\n        pass",
            "except Exception",
        ),
        (
            "def f(x):\n    try:\n        x()\n    except (OSError, BaseException):\n        pass",
            "except Exception",
        ),
    ],
)
def test_a_hidden_fault_is_caught(code: str, rule: str):
    assert set(findings("src/luyen/a.py", code)) == {f"src/luyen/a.py::f: {rule}"}


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("src/luyen/utils.py", ""),
        ("src/luyen/helpers/a.py", ""),
        ("src/luyen/a.py", "class RunManager: ..."),
        ("src/luyen/a.py", "class BaseRun:\n    def go(self):\n        return 1"),
        ("src/luyen/a.py", "x = 1  # TODO later"),
        ("src/luyen/a.py", "x = y  # noqa"),
        ("src/luyen/a.py", "x = y  # type: ignore"),
    ],
)
def test_an_empty_name_and_an_unfinished_line_are_caught(path: str, code: str):
    assert len(list(findings(path, code))) == 1


def test_what_is_allowed_is_not_caught():
    code = (
        "class Baseline:\n    def go(self):\n        return getattr(self, 'x')\n"
        "class BaseReader:\n    def read(self) -> str:\n        '''Text.'''\n        ...\n"
        "x = y  # noqa: E501\nz = y  # type: ignore[arg-type]\n"
        "try:\n    x()\nexcept OSError:\n    raise\n"
    )
    assert list(findings("src/luyen/a.py", code)) == []
    assert list(findings("src/luyen/cli/a.py", "print(1)")) == []


def test_an_excuse_needs_a_reason_and_a_use():
    assert violations({"a: hasattr"}, {"a: hasattr": "duck typing at the plugin door"}) == []
    assert violations({"a: hasattr"}, {"a: hasattr": ""}) == ["a: hasattr"]
    assert violations(set(), {"a: hasattr": "gone"}) == ["excuse for nothing: a: hasattr"]
