"""Records are frozen, slotted, keyword-only, documented field by field, and show an example."""

import ast

import pytest

from tests.architecture.tree import parsed, sources, statements

FLAGS = ("frozen", "slots", "kw_only")


def dataclass_flags(node: ast.ClassDef) -> set[str] | None:
    """The flags set to True in the dataclass decorator; None for a class that is no dataclass."""
    for decorator in node.decorator_list:
        call = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = call.attr if isinstance(call, ast.Attribute) else getattr(call, "id", None)
        if name == "dataclass":
            words = decorator.keywords if isinstance(decorator, ast.Call) else []
            return {
                str(w.arg)
                for w in words
                if isinstance(w.value, ast.Constant) and w.value.value is True
            }
    return None


def undocumented_fields(node: ast.ClassDef) -> list[str]:
    """Fields without a string on the statement that follows them."""
    missing: list[str] = []
    for i, statement in enumerate(node.body):
        if not isinstance(statement, ast.AnnAssign) or "ClassVar" in ast.dump(statement.annotation):
            continue
        after = node.body[i + 1] if i + 1 < len(node.body) else None
        documented = (
            isinstance(after, ast.Expr)
            and isinstance(after.value, ast.Constant)
            and isinstance(after.value.value, str)
            and after.value.value.strip() != ""
        )
        if not documented:
            missing.append(ast.unparse(statement.target))
    return missing


def violations(text: str) -> list[str]:
    """What each dataclass of a file lacks."""
    problems: list[str] = []
    for node in statements(parsed(text)):
        flags = dataclass_flags(node) if isinstance(node, ast.ClassDef) else None
        if flags is None:
            continue
        assert isinstance(node, ast.ClassDef)
        problems += [f"{node.name}: not {flag}" for flag in FLAGS if flag not in flags]
        if "Example" not in (ast.get_docstring(node) or ""):
            problems.append(f"{node.name}: no Example in its docstring")
        missing = undocumented_fields(node)
        problems += [f"{node.name}.{name}: no docstring under the field" for name in missing]
    return problems


def test_every_record_is_frozen_and_documented():
    texts = dict(sources())
    assert sum("@dataclass" in text for text in texts.values()) > 3
    found = [f"{path}: {p}" for path, text in texts.items() for p in violations(text)]
    assert found == []


GOOD = '''
from dataclasses import dataclass

@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A point. Example: Point(x=1)."""

    x: int
    """Where."""
    unit: ClassVar[str] = "m"
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("frozen=True, ", ""),
        ("slots=True", "slots=False"),
        (", kw_only=True", ""),
        ("Example: ", ""),
        ('\n    """Where."""', ""),
        ('"""Where."""', '""" """'),
    ],
)
def test_a_record_that_lacks_something_is_caught(old: str, new: str):
    assert violations(GOOD) == []
    assert old in GOOD
    assert len(violations(GOOD.replace(old, new))) == 1


def test_a_plain_decorator_and_a_dotted_one_are_seen():
    assert len(violations("@dataclass\nclass P:\n    x: int")) == 5
    assert len(violations("@dataclasses.dataclass\nclass P:\n    x: int")) == 5
