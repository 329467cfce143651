"""Every example in a docstring runs and prints what it says.

Docstrings are found in the syntax tree: the finder of `doctest` passes over functions that a
decorator has wrapped, and under pytest the shape checker wraps all of `luyen.algorithms`.
"""

import ast
import doctest
import importlib
from collections.abc import Iterator

import pytest

from tests.architecture.tree import parsed, sources, statements

DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def examples(text: str) -> Iterator[tuple[str, str]]:
    """(name, docstring) of everything in a file whose docstring holds an example."""
    for node in statements(parsed(text)) if ">>>" in text else ():
        doc = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
        if doc is not None and ">>>" in doc:
            yield "<module>" if isinstance(node, ast.Module) else node.name, doc


def failure(name: str, doc: str, names: dict[str, object]) -> str:
    """What an example printed instead of what it says; empty when they agree."""
    lines: list[str] = []
    test = doctest.DocTestParser().get_doctest(doc, dict(names), name, None, None)
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    runner.run(test, out=lines.append)
    return "".join(lines)


FILES = [(path, text) for path, text in sources() if any(examples(text))]


@pytest.mark.parametrize(("path", "text"), FILES, ids=[path for path, _ in FILES])
def test_every_docstring_example_is_true(path: str, text: str):
    dotted = path.removeprefix("src/").removesuffix(".py").replace("/", ".")
    module = importlib.import_module(dotted.removesuffix(".__init__"))
    assert [
        said for name, doc in examples(text) if (said := failure(name, doc, vars(module)))
    ] == []


def test_examples_exist():
    assert len(FILES) > 5


def test_a_false_example_is_caught():
    text = "@wrapped\ndef f():\n    '''Two.\n\n    >>> 1 + 1\n    3\n    '''\n"
    [(name, doc)] = examples(text)
    assert "Expected:\n    3\nGot:\n    2" in failure(name, doc, {})
    assert failure(name, doc.replace("3", "2"), {}) == ""
