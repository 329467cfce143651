"""Every preference loss has a page, and the page is true of the code."""

import ast
from pathlib import Path

import pytest

from luyen.algorithms.preference import preference_losses
from luyen.algorithms.preference.step import PreferenceObjective, preference_facts
from tests.architecture.pages import blocks, links, sections
from tests.architecture.registered import Knobs, knobs_of, ours
from tests.architecture.test_algorithm_pages import ROW, refused
from tests.architecture.tree import ROOT
from tests.unit.algorithms.preference_steps import (
    answer_inputs,
    make_answers,
    make_others,
    make_pairs,
    pair_inputs,
)

FOLDER = ROOT / "docs" / "algorithms" / "preference"
NAMES = ours(preference_losses)
REQUIRED = ("Formula", "Preset", "Use", "Paper", "Knobs", "Metrics")


def written_knobs(text: str) -> Knobs:
    """Name -> default in the table of knobs."""
    found = ROW.findall(sections(text)["Knobs"])
    return {
        name: default if name.endswith("_type") else ast.literal_eval(default)
        for name, default in found
    }


def reported(name: str) -> set[str]:
    """Metrics that the loss returns."""
    if preference_facts(name).kind == "pair":
        inputs = pair_inputs(make_pairs(0))
    else:
        inputs = answer_inputs(name, make_answers(0), make_others(0))
    return set(PreferenceObjective(losses=(name,))(inputs).metrics)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_is_true_of_its_loss(name: str, tmp_path: Path):
    text = (FOLDER / f"{name}.md").read_text()
    found = sections(text)
    assert [title for title in REQUIRED if not found.get(title, "").strip()] == []
    assert written_knobs(text) == knobs_of(preference_losses.get(name))
    assert {m for m in reported(name) if f"`{m}`" in found["Metrics"]} == reported(name)
    assert f'"{name}"' in blocks(found["Use"], "python")[0]
    (preset,) = blocks(found["Preset"], "yaml")
    assert f"loss_type: {name}\n" in preset
    assert refused(preset, tmp_path) == []


def test_every_page_has_a_loss_and_the_overview_leads_to_each():
    written = {path.stem for path in FOLDER.glob("*.md")} - {"README"}
    assert written == set(NAMES)
    overview = (FOLDER / "README.md").read_text()
    assert {Path(target).stem for target in links(overview)} == set(NAMES)
