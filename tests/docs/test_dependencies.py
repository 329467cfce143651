"""The page of dependencies names every package that is declared, and only modules that exist."""

import re
import tomllib

from tests.architecture.tree import ROOT

PAGE = (ROOT / "docs" / "dependencies.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TOOLS = "dev"


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=\[; ]", one, maxsplit=1)[0] for one in requirements}


def test_every_declared_package_is_on_the_page():
    extras = PROJECT["optional-dependencies"]
    declared = names(PROJECT["dependencies"])
    declared |= {name for extra, found in extras.items() if extra != TOOLS for name in names(found)}
    assert sorted(name for name in declared if f"`{name}`" not in PAGE) == []


def test_every_extra_has_its_row():
    rows = set(re.findall(r"^\| `([\w-]+)` \| (?:`|the extras)", PAGE, re.MULTILINE))
    assert rows == set(PROJECT["optional-dependencies"])


def test_the_row_of_an_extra_lists_its_packages():
    for extra, found in PROJECT["optional-dependencies"].items():
        if extra != TOOLS:
            [row] = re.findall(rf"^\| `{extra}` \| (`[^|]*) \|", PAGE, re.MULTILINE)
            assert set(re.findall(r"`([\w-]+)`", row)) == names(found)
