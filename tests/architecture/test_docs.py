"""What pages name is there: names resolve, links lead somewhere; `tests/docs` runs the examples."""

import ast
import importlib
import re
from functools import cache
from typing import Any

import pytest
import typer

import luyen
from luyen.cli.main import app
from luyen.config.explain import config_page
from tests.architecture.pages import anchors, blocks, commands, links, pages, spans
from tests.architecture.tree import PACKAGE, ROOT

PAGES = dict(pages())
DOTTED = re.compile(r"\bluyen(?:\.[A-Za-z_]\w*)+")
TARGETS = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def resolves(name: str) -> bool:
    """Whether a dotted name is public, a module, or an attribute reached from one."""
    parts = name.split(".")
    found: object = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if found is luyen and part in luyen.__all__ and i == len(parts):
            return True
        if part in vars(found):
            found = vars(found)[part]
            continue
        try:
            found = importlib.import_module(".".join(parts[:i]))
        except ModuleNotFoundError:
            return False
    return True


@cache
def command_table() -> dict[str, Any]:
    """Every command of `luyen` by name."""
    group = typer.main.get_command(app)
    context = typer.Context(group)
    return {name: group.get_command(context, name) for name in group.list_commands(context)}


def unknown_commands(text: str) -> list[str]:
    """`luyen` commands and options, and `make` targets, that do not exist."""
    table = command_table()
    wrong: list[str] = []
    for words in commands(text, "luyen"):
        command, rest = table.get(words[1]), words[2:]
        if isinstance(command, typer.core.TyperGroup) and rest:
            command = command.commands.get(rest[0])
        options = {o for p in command.params for o in p.opts} | {"--help"} if command else set()
        flags = [w.split("=")[0] for w in rest if w.startswith("--")]
        if command is None or not set(flags) <= options:
            wrong.append(" ".join(words))
    return wrong + [w[1] for w in commands(text, "make") if w[1] not in TARGETS and "=" not in w[1]]


def broken_links(path: str, text: str) -> list[str]:
    """Links to a file or a heading that is not there."""
    wrong: list[str] = []
    for target in links(text):
        file, _, anchor = target.partition("#")
        found = (ROOT / path).parent / file
        known = anchors(found.read_text() if found.is_file() else text) if anchor else {""}
        if not found.exists() or anchor not in known:
            wrong.append(target)
    return wrong


@pytest.mark.parametrize("path", PAGES)
def test_every_name_command_and_link_of_a_page_exists(path: str):
    text = PAGES[path]
    assert [name for name in set(DOTTED.findall(text)) if not resolves(name)] == []
    assert unknown_commands(text) == []
    assert broken_links(path, text) == []


def test_the_readme_gives_every_package_a_purpose():
    packages = {p.parent.name for p in (ROOT / PACKAGE).glob("*/__init__.py")}
    tree = "".join(blocks(PAGES["README.md"], "text"))
    assert packages <= set(re.findall(r"^\s+(\w+)/ +\w", tree, re.MULTILINE))


@pytest.mark.parametrize("language", ["console", "sh", "python", "yaml"])
def test_the_vietnamese_readme_has_the_code_blocks_of_the_english_one(language: str):
    english, vietnamese = PAGES["README.md"], PAGES["README.vi.md"]
    assert blocks(english, language) != []
    assert blocks(vietnamese, language) == blocks(english, language)


def test_the_vietnamese_readme_has_the_links_and_spans_of_the_english_one():
    english, vietnamese = PAGES["README.md"], PAGES["README.vi.md"]
    assert "README.md" in links(vietnamese)
    assert set(links(vietnamese)) - {"README.md"} == set(links(english)) - {"README.vi.md"}
    assert sorted(spans(vietnamese)) == sorted(spans(english))


def internal_imports(text: str) -> list[str]:
    """Modules below `luyen` that a Python file imports: they are not public."""
    found: list[str] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            found.append(node.module or "")
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
    return [name for name in found if name.startswith("luyen.")]


def test_extensions_use_the_public_surface_only():
    page = PAGES["docs/extend.md"]
    plugins = [path.read_text() for path in sorted((ROOT / "examples/extension").glob("*.py"))]
    assert len(plugins) >= 1
    for text in [*plugins, *blocks(page, "python")]:
        assert internal_imports(text) == []
    named = {name.partition(".")[2] for name in DOTTED.findall(page)}
    assert "adv_estimators" in named
    assert named <= set(luyen.__all__)


def test_every_word_of_the_glossary_is_mapped_to_code():
    rows = [line for line in PAGES["docs/glossary.md"].splitlines() if line.startswith("| **")]
    assert len(rows) >= 50
    unmapped = [row for row in rows if not re.search(r"`[\w./=]+`|\]\(", row.split(" | ")[-1])]
    assert unmapped == []


def test_an_internal_import_is_caught():
    assert internal_imports("from luyen.base.records import Prompt") == ["luyen.base.records"]
    assert internal_imports("import luyen\nfrom luyen import Prompt\nimport torch") == []


def test_the_configuration_reference_is_up_to_date():
    assert PAGES["docs/config.md"] == config_page(), "run `make docs`"


def test_a_name_that_is_not_there_is_caught():
    assert resolves("luyen.base.registry.Registry.register")
    assert not resolves("luyen.base.registry.Catalogue")
    assert not resolves("luyen.nowhere")


def test_a_command_that_is_not_there_is_caught():
    planted = "`luyen conjure`, `luyen check --loudly a.yaml`\n\n```console\n$ make tea\n```\n"
    assert unknown_commands(planted) == ["luyen conjure", "luyen check --loudly a.yaml", "tea"]
    assert unknown_commands("`luyen data conjure` `luyen data inspect a --loud`") == [
        "luyen data conjure",
        "luyen data inspect a --loud",
    ]
    assert unknown_commands("`luyen check a.yaml` and `make test`") == []


def test_a_broken_link_is_caught():
    planted = "[a](nowhere.md) [b](LICENSE) [c](https://example.org) [d](#home) [e](#away)\n# Home"
    assert broken_links("README.md", planted) == ["nowhere.md", "#away"]
