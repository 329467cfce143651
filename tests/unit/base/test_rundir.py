"""A folder with a manifest is a whole run directory; no run is ever written over."""

import json
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.base.rundir import RunDirectory, new_run_id, step_name, step_of


def begin(root: Path) -> RunDirectory:
    return RunDirectory.create(
        root,
        config="trainer:\n  nnodes: 1\n",
        provenance={"trainer.nnodes": "a.yaml:2"},
        manifest={"seeds": {"run": 7}},
    )


def test_a_new_run_has_its_config_provenance_and_manifest(tmp_path: Path):
    run = begin(tmp_path / "p" / "e")
    assert run.config.read_text() == "trainer:\n  nnodes: 1\n"
    assert json.loads(run.provenance.read_text()) == {"trainer.nnodes": "a.yaml:2"}
    manifest = run.read_manifest()
    assert (manifest["schema"], manifest["seeds"]) == (1, {"run": 7})
    assert sorted(p.name for p in run.root.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "events",
        "manifest.json",
        "provenance.json",
        "rollouts",
    ]


def test_a_resumed_run_keeps_its_id(tmp_path: Path):
    assert begin(tmp_path / "e").run_id == RunDirectory.open(tmp_path / "e").run_id
    assert len({new_run_id() for _ in range(50)}) == 50


def test_files_of_a_step_have_their_place(tmp_path: Path):
    run = RunDirectory(tmp_path)
    assert run.rollouts(123) == tmp_path / "rollouts" / "step_000123.parquet"
    assert run.rollouts(0, validation=True) == tmp_path / "validation" / "step_000000.parquet"
    assert run.checkpoint(1234567) == tmp_path / "checkpoints" / "step_1234567"
    assert list(tmp_path.iterdir()) == [], "naming a path makes nothing"


@pytest.mark.parametrize("step", [0, 7, 999_999, 1_000_000])
def test_a_step_is_read_back_from_its_name(step: int):
    assert step_of(step_name(step)) == step_of(f"{step_name(step)}.parquet") == step


@pytest.mark.parametrize("name", [".tmp-step_000001-9-ab", "step_", "steps_1", "replaced-step_1"])
def test_other_names_are_no_step(name: str):
    assert step_of(name) is None


def test_a_run_is_not_written_over(tmp_path: Path):
    begin(tmp_path / "e")
    with pytest.raises(UserError, match="holds a run already"):
        begin(tmp_path / "e")


def test_a_folder_with_other_files_is_refused(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("dear")
    with pytest.raises(UserError, match=r"thesis\.tex"):
        begin(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]
    with pytest.raises(UserError, match="in the way"):
        begin(tmp_path / "thesis.tex")


def test_a_beginning_that_was_killed_can_be_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def killed() -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("luyen.base.rundir.new_run_id", killed)
    with pytest.raises(KeyboardInterrupt):
        begin(tmp_path / "e")
    (tmp_path / "e" / ".tmp-manifest.json-1-aa").touch()
    assert (tmp_path / "e" / "config.yaml").is_file()
    with pytest.raises(UserError, match="no run was begun"):
        RunDirectory.open(tmp_path / "e")
    monkeypatch.undo()
    assert begin(tmp_path / "e").exists


def test_a_later_layout_and_a_damaged_manifest_are_refused(tmp_path: Path):
    run = begin(tmp_path / "e")
    run.manifest.write_text('{"schema": 2}')
    with pytest.raises(UserError, match=r"layout 2.*newer luyen"):
        RunDirectory.open(run.root)
    run.manifest.write_text('{"schema": 1')
    with pytest.raises(UserError, match=r"manifest\.json.*damaged"):
        RunDirectory.open(run.root)
