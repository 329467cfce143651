"""Every estimator and every policy loss has a page, and the page is true of the code."""

import ast
import re
from pathlib import Path

import pytest

from luyen.config.check import check
from tests.architecture.pages import blocks, sections
from tests.architecture.registered import Knobs, estimators, losses
from tests.architecture.tree import ROOT

FOLDERS = {"advantages": estimators(), "losses": losses()}
ENTRIES = [(folder, name) for folder, known in FOLDERS.items() for name in known]
REQUIRED = ("Formula", "Preset", "Paper", "Knobs", "Metrics")
ROW = re.compile(r"^\| *`(\w+)` *\| *`([^`]*)` *\|", re.MULTILINE)
BASE = ROOT / "recipes" / "quickstart.yaml"


def page(folder: str, name: str) -> Path:
    """Where the page of an algorithm lies."""
    return ROOT / "docs" / "algorithms" / folder / f"{name}.md"


def literal(text: str) -> object:
    """The value a default is written as; the text itself when it is no literal."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def violations(text: str, actual: Knobs) -> list[str]:
    """What a page lacks, and where its table of knobs differs from the code."""
    found = sections(text)
    problems = [f"no section {title}" for title in REQUIRED if not found.get(title, "").strip()]
    written = {name: literal(default) for name, default in ROW.findall(found.get("Knobs", ""))}
    problems += [f"no knob {name}" for name in written if name not in actual]
    for name, default in actual.items():
        if name not in written:
            problems.append(f"knob {name} is not in the table")
        elif written[name] not in (default, repr(default)):
            problems.append(f"default of {name} is {default!r}, not {written[name]!r}")
    if not blocks(found.get("Preset", ""), "yaml"):
        problems.append("no yaml block under Preset")
    return problems


def refused(preset: str, folder: Path) -> list[str]:
    """Errors of the quick-start recipe with a preset laid over it."""
    file = folder / "preset.yaml"
    file.write_text(preset)
    report = check([BASE, file])
    return [f"{p.field}: {p.why}" for p in report.problems if p.severity == "error"]


@pytest.mark.parametrize(("folder", "name"), ENTRIES, ids=["/".join(e) for e in ENTRIES])
def test_a_page_is_true_of_its_function(folder: str, name: str, tmp_path: Path):
    text = page(folder, name).read_text()
    assert violations(text, FOLDERS[folder][name]) == []
    assert [said for b in blocks(text, "yaml") if (said := refused(b, tmp_path))] == []


def test_no_page_describes_what_is_not_there():
    written = {
        (folder, file.stem)
        for folder in FOLDERS
        for file in page(folder, "x").parent.glob("*.md")
        if file.stem != "README"
    }
    assert written == set(ENTRIES)


GOOD = """# x
## Formula
y = x
## Preset
```yaml
trainer: {}
```
## Paper
None.
## Knobs
| knob | default | meaning |
|---|---|---|
| `gamma` | `1.0` | discount |
## Metrics
None.
"""


EXAMPLE: Knobs = {"gamma": 1.0}


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("## Paper\nNone.\n", "", "no section Paper"),
        ("## Metrics\nNone.\n", "## Metrics\n", "no section Metrics"),
        ("`1.0`", "`0.99`", "default of gamma is 1.0, not 0.99"),
        ("`gamma`", "`lam`", "no knob lam"),
        ("| `gamma` | `1.0` | discount |\n", "", "knob gamma is not in the table"),
        ("```yaml", "```text", "no yaml block under Preset"),
    ],
)
def test_a_false_page_is_caught(old: str, new: str, problem: str):
    assert violations(GOOD, EXAMPLE) == []
    assert problem in violations(GOOD.replace(old, new), EXAMPLE)


def test_a_preset_that_check_refuses_is_caught(tmp_path: Path):
    assert refused("algorithm:\n  adv_estimator: no_such_estimator\n", tmp_path)
