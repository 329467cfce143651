"""Paths are meant from the file that names them, those of the command line from the folder."""

from pathlib import Path

import pytest

from luyen.cli.check import report_lines
from luyen.config.check import Report, check
from luyen.config.fields import all_fields
from luyen.config.loader.load import load
from luyen.config.loader.paths import PATHS
from luyen.config.machine import Machine
from tests.architecture.tree import ROOT

LAPTOP = Machine(cpus=2, ram_bytes=16 * 1024**3)
WRITTEN = ("trainer.profile.save_path", "reward.cache.path")
"""Paths that a run writes to."""


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def project(tmp_path: Path, rows: str = "rows.jsonl") -> Path:
    folder = tmp_path / "project"
    (folder / "more").mkdir(parents=True)
    (folder / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    (folder / "reward.py").write_text("def compute_score(completions, **columns): ...\n")
    file = folder / "run.yaml"
    file.write_text(
        f"data: {{train_files: [{rows}]}}\n"
        "reward: {custom_reward_function: {path: ./reward.py}}\n"
        "trainer: {plugins: reward.py}\n"
    )
    return file


def checked(file: Path, *words: str) -> Report:
    return check([file], words, machine=LAPTOP)


def test_every_key_that_names_a_path_is_listed():
    named = {p for p in all_fields() if p.endswith(("path", "_files", "plugins"))}
    assert named - set(WRITTEN) == set(PATHS)


def test_files_are_found_beside_the_file_that_names_them(tmp_path: Path, elsewhere: Path):
    file = project(tmp_path)
    config = checked(file).config
    assert config.data.train_files == (str(file.parent / "rows.jsonl"),)
    assert config.reward.custom_reward_function.path == str(file.parent / "reward.py")
    assert config.trainer.plugins == (str(file.parent / "reward.py"),)


def test_an_included_file_means_its_own_folder(tmp_path: Path, elsewhere: Path):
    file = project(tmp_path)
    outer = file.parent / "more" / "outer.yaml"
    outer.write_text("defaults: [../run.yaml]\ndata: {val_files: ../rows.jsonl}\n")
    data = checked(outer).config.data
    assert data.train_files == data.val_files == (str(file.parent / "rows.jsonl"),)


def test_the_command_line_means_the_working_directory(tmp_path: Path, elsewhere: Path):
    (elsewhere / "rows.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    found = checked(project(tmp_path), "data.train_files=rows.jsonl")
    assert found.config.data.train_files == (str(elsewhere / "rows.jsonl"),)
    assert not [p for p in found.problems if p.id == "C015"]


def test_a_file_of_the_working_directory_is_taken_with_a_note(tmp_path: Path, elsewhere: Path):
    (elsewhere / "mine.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    found = checked(project(tmp_path, "mine.jsonl"))
    assert found.config.data.train_files == (str(elsewhere / "mine.jsonl"),)
    [note] = [p for p in found.problems if p.id == "C015"]
    assert (note.severity, note.field) == ("note", "data.train_files")
    assert "write ../elsewhere/mine.jsonl" in note.fix
    assert "note C015" in "\n".join(report_lines(found, [], LAPTOP))


def test_what_is_no_file_stays_as_it_is_written(tmp_path: Path, elsewhere: Path):
    file = project(tmp_path, "arithmetic://sum")
    words = ("actor_rollout_ref.model.path=org/model", "critic.model.path=~/nowhere")
    values = load([file], words).values
    assert values["data"]["train_files"] == ["arithmetic://sum"]
    assert values["actor_rollout_ref"]["model"]["path"] == "org/model"
    assert values["critic"]["model"]["path"] == "~/nowhere"
    missing = checked(project(tmp_path / "b", "gone.jsonl"))
    assert missing.config.data.train_files == ("gone.jsonl",)
    assert [p.field for p in missing.problems if p.id == "D02"] == ["data.train_files"]


@pytest.mark.parametrize("recipe", ["tool_calling.yaml", "tool_calling_search.yaml"])
def test_tool_recipes_are_sound_from_any_folder(recipe: str, elsewhere: Path):
    found = check([ROOT / "recipes" / recipe], [], machine=LAPTOP)
    assert found.is_sound, found.problems
