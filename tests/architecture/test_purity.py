"""The mathematics is pure: no logging, no config objects, no collectives, no device moves."""

import ast

import pytest

from tests.architecture.tree import imported, parsed, sources

FORBIDDEN_IMPORTS = ("logging", "warnings", "torch.distributed", "os", "random", "numpy")
FORBIDDEN_METHODS = ("cuda", "cpu")


READABLE = ("luyen.config.catalog.", "luyen.config.catalog.")
"""Names and thresholds: what `check` and the mathematics must read alike."""


def violations(text: str) -> list[str]:
    """What a file of `algorithms/` does that a pure function may not, with the line."""
    tree = parsed(text)
    problems: list[str] = []
    for line, name in imported(tree):
        outside = any(f"{name}.".startswith(f"{bad}.") for bad in FORBIDDEN_IMPORTS)
        config = f"{name}.".startswith("luyen.config.")
        if outside or (config and not f"{name}.".startswith(READABLE)):
            problems.append(f"{line}: imports {name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Global | ast.Nonlocal):
            problems.append(f"{node.lineno}: changes {', '.join(node.names)} from inside")
        elif isinstance(node, ast.Attribute) and node.attr == "distributed":
            problems.append(f"{node.lineno}: reaches torch.distributed")
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr in FORBIDDEN_METHODS:
                problems.append(f"{node.lineno}: moves a tensor with .{node.func.attr}()")
            elif node.func.attr == "manual_seed":
                problems.append(f"{node.lineno}: sets a global seed")
    return problems


def test_the_mathematics_is_pure():
    files = list(sources("src/luyen/algorithms"))
    assert len(files) > 5
    found = [f"{path}:{problem}" for path, text in files for problem in violations(text)]
    assert found == []


@pytest.mark.parametrize(
    "code",
    [
        "import logging",
        "from logging import getLogger",
        "def f():\n    import logging",
        "from luyen.config.check import check",
        "from luyen.config import schema",
        "import luyen.config",
        "from torch import distributed",
        "import torch.distributed as dist",
        "import torch\ndef f(x):\n    torch.distributed.all_reduce(x)",
        "def f(x):\n    return x.cuda()",
        "import torch\ntorch.manual_seed(0)",
        "seen = 0\ndef f():\n    global seen",
    ],
)
def test_an_impurity_is_caught(code: str):
    assert len(violations(code)) == 1


def test_the_catalog_of_names_may_be_read():
    assert violations("from luyen.config.catalog import POLICY_LOSSES") == []
    assert violations("from luyen.config import catalog\nimport torch") == []


def unsafe_starts(text: str) -> list[str]:
    """Lists that start a module of this interpreter and let the current folder stand in for it."""
    found: list[str] = []
    for node in ast.walk(parsed(text)):
        words = [ast.unparse(one) for one in node.elts] if isinstance(node, ast.List) else []
        if "sys.executable" in words and "'-m'" in words and "'-P'" not in words:
            found.append(f"{node.lineno}: {', '.join(words)}")
    return found


@pytest.mark.parametrize(("path", "text"), list(sources("src/luyen")))
def test_no_process_takes_modules_from_the_current_folder(path: str, text: str):
    flagged = {"src/luyen/sandbox/launch.py"}  # its flags are a list of their own, with -P
    assert path in flagged or not unsafe_starts(text)


def test_a_start_without_the_flag_is_found():
    assert unsafe_starts("run([sys.executable, '-m', 'luyen'])")
    assert not unsafe_starts("run([sys.executable, '-P', '-m', 'luyen'])")
