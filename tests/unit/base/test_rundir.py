"""A folder with a manifest is a whole run directory; no run is ever written over."""

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
    assert run.read_config() == "trainer:\n  nnodes: 1\n"
    assert run.read_provenance() == {"trainer.nnodes": "a.yaml:2"}
    manifest = run.read_manifest()
    assert (manifest["schema"], manifest["seeds"]) == (2, {"run": 7})
    assert sorted(p.name for p in run.root.iterdir()) == [
        "checkpoints",
        "config.yaml",
        "events",
        "manifest.json",
        "provenance.json",
        "resumptions.json",
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
    run.manifest.write_text('{"schema": 3}')
    with pytest.raises(UserError, match=r"layout 3.*newer luyen"):
        RunDirectory.open(run.root)
    run.manifest.write_text('{"schema": 1')
    with pytest.raises(UserError, match=r"manifest\.json.*damaged"):
        RunDirectory.open(run.root)


def test_any_flipped_bit_of_the_first_files_is_found(tmp_path: Path):
    run = begin(tmp_path / "e")
    reads = {
        run.manifest: run.read_manifest,
        run.config: run.read_config,
        run.provenance: run.read_provenance,
        run.resumptions: run.read_resumptions,
    }
    for path, read in reads.items():
        content, was = path.read_bytes(), read()
        for place in range(8 * len(content)):
            flipped = bytearray(content)
            flipped[place // 8] ^= 1 << place % 8
            path.write_bytes(flipped)
            try:
                found, said = read(), path.name  # a flip in white space changes nothing
            except UserError as error:
                found, said = was, str(error)
            assert (found, path.name in said) == (was, True), f"bit {place} of {path.name}"
        path.write_bytes(content)


def test_a_run_of_the_layout_without_seals_is_read(tmp_path: Path):
    run = begin(tmp_path / "e")
    run.manifest.write_text('{"schema": 1, "run_id": "old"}')
    run.config.write_text("trainer: {}")
    run.provenance.write_text('{"a": "b.yaml:1"}')
    found = RunDirectory.open(run.root)
    assert (found.run_id, found.read_config(), found.read_provenance()) == (
        "old",
        "trainer: {}",
        {"a": "b.yaml:1"},
    )
    run.write_config("trainer: {seed: 1}", {"a": "c.yaml:1"})
    assert (found.read_config(), found.read_provenance()) == (
        "trainer: {seed: 1}",
        {"a": "c.yaml:1"},
    )


def test_files_that_lost_their_seal_or_are_gone_are_named(tmp_path: Path):
    run = begin(tmp_path / "e")
    run.config.write_text("trainer: {}")
    with pytest.raises(UserError, match=r"config\.yaml.*not as it was written"):
        run.read_config()
    run.config.unlink()
    with pytest.raises(UserError, match=r"config\.yaml.*missing"):
        run.read_config()


def test_resumptions_are_listed_in_order(tmp_path: Path):
    run = begin(tmp_path / "e")
    assert run.read_resumptions() == []
    for step in (3, 5):
        run.note_resumption({"checkpoint": step})
    assert [entry["checkpoint"] for entry in run.read_resumptions()] == [3, 5]
    assert set(run.read_resumptions()[0]) == {"time", "checkpoint"}
    run.resumptions.write_text(run.resumptions.read_text().replace("3", "4", 1))
    with pytest.raises(UserError, match=r"resumptions\.json"):
        run.read_resumptions()
