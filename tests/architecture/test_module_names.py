"""The record of guesses from module names (`module_names.md`) names modules that exist."""

import re
from collections.abc import Sequence
from typing import NamedTuple

from tests.architecture.pages import sections
from tests.architecture.tree import PACKAGE, ROOT

PAGE = (ROOT / "tests/architecture/module_names.md").read_text()
ROW = re.compile(
    r"^\| `([\w/]+)` \| (.+?) \| (right|partly|wrong)\b[^|]*\| ([^|]*?) ?\|$", re.MULTILINE
)
DRAWS = ("first", "second", "third")
DRAW, BAR = 50, 45


class Guess(NamedTuple):
    """A row of a draw."""

    module: str
    guess: str
    verdict: str
    remedy: str


def guesses(text: str) -> list[Guess]:
    """Rows about modules, in order."""
    return [Guess(*found) for found in ROW.findall(text)]


MERGED = re.compile(r"merged into `([\w/]+)`")


def absent(rows: Sequence[Guess]) -> list[str]:
    """Modules of the rows that are not in the package, nor merged into one that is."""
    places = {row.module: MERGED.fullmatch(row.remedy) for row in rows}
    files = {module: module if found is None else found[1] for module, found in places.items()}
    return [
        module for module, file in files.items() if not (ROOT / PACKAGE / f"{file}.py").is_file()
    ]


def tally(rows: Sequence[Guess]) -> tuple[int, int, int, int]:
    """How many are right, partly right and wrong, and how many of the latter have no remedy."""
    verdicts = [row.verdict for row in rows]
    left = sum(row.verdict != "right" and not row.remedy for row in rows)
    return verdicts.count("right"), verdicts.count("partly"), verdicts.count("wrong"), left


def test_every_draw_lists_modules_that_exist_and_counts_them_right():
    pages = sections(PAGE)
    draws = {name: guesses(pages[f"{name.capitalize()} draw"]) for name in DRAWS}
    for name, rows in draws.items():
        assert len(rows) == DRAW
        assert absent(rows) == []
        assert f"| {name} | {' | '.join(str(n) for n in tally(rows))} |" in PAGE
        assert DRAW - tally(rows)[3] >= BAR
    modules = [row.module for rows in draws.values() for row in rows]
    assert len(set(modules)) == len(modules)


def test_a_module_that_is_gone_and_a_name_without_remedy_are_caught():
    planted = (
        "| `base/ghost` | haunts | wrong: there is none |  |\n| `base/files` | files | right |  |\n"
        "| `base/old` | old | right | merged into `base/files` |\n"
        "| `base/lost` | lost | right | merged into `base/ghost` |\n"
    )
    rows = guesses(planted)
    assert absent(rows) == ["base/ghost", "base/lost"]
    assert tally(rows) == (3, 0, 1, 1)
