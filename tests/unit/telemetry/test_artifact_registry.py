"""Artifacts of many runs, found by name and hash, whatever became of the index."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.base.rundir import RunDirectory
from luyen.cli.artifacts import run_list, run_rebuild, run_show, run_verify
from luyen.telemetry.artifact_registry import ArtifactRegistry, made_at, note, run_directories
from luyen.telemetry.artifacts import (
    NAME,
    NOTE,
    Artifact,
    difference,
    hash_files,
    hash_of,
    read_artifacts,
    rewrite_artifacts,
)


def begin(root: Path, name: str) -> RunDirectory:
    return RunDirectory.create(root / name, config="", provenance={}, manifest={})


def export(run: RunDirectory, content: str, *, parents: tuple[str, ...] = ()) -> Artifact:
    folder = run.root / "export"
    folder.mkdir()
    (folder / "weights").write_text(content)
    files = hash_files(folder)
    name = "/".join(run.root.parts[-2:])
    return Artifact(
        kind="export",
        name=name,
        hash=hash_of(files),
        path=str(folder),
        run=run.run_id,
        parents=parents,
        files=files,
    )


@pytest.fixture
def two(tmp_path: Path) -> tuple[Artifact, Artifact]:
    """An export, and another that was made from it."""
    first, second = begin(tmp_path, "p/one"), begin(tmp_path, "p/deep/two")
    parent = export(first, "1")
    note(first, [parent], tmp_path)
    child = export(second, "2", parents=(parent.hash,))
    read = replace(parent, run=second.run_id, used_as="actor_rollout_ref.model.path")
    note(second, [read, child], tmp_path)
    return parent, child


def test_runs_are_found_wherever_they_lie(two: tuple[Artifact, Artifact], tmp_path: Path):
    found = [run.root.relative_to(tmp_path).as_posix() for run in run_directories(tmp_path)]
    assert found == ["p/deep/two", "p/one"]
    assert [run.root for run in run_directories(tmp_path / "p/one")] == [tmp_path / "p/one"]


def test_an_artifact_is_found_by_name_by_hash_and_by_both(
    two: tuple[Artifact, Artifact], tmp_path: Path
):
    registry = ArtifactRegistry(tmp_path)
    parent, child = two
    assert registry.find("p/one") == [parent]
    assert registry.find(parent.title) == [parent]
    assert registry.find(child.hash) == registry.find(child.hash[7:15]) == [child]
    assert registry.find(f"p/one@{child.hash[7:15]}") == []
    assert registry.one(parent.title, "key") == parent
    assert registry.maker(child.parents[0]) == parent


def test_a_name_that_nobody_noted_is_refused_with_what_there_is(
    two: tuple[Artifact, Artifact], tmp_path: Path
):
    with pytest.raises(UserError) as refused:
        ArtifactRegistry(tmp_path).one(
            two[0].title.replace("one", "onn"), "actor_rollout_ref.model.path"
        )
    assert two[0].title in refused.value.fix


def test_a_name_of_two_contents_needs_its_hash(two: tuple[Artifact, Artifact], tmp_path: Path):
    again = begin(tmp_path, "q/one")
    note(again, [replace(export(again, "other"), name="p/one")], tmp_path)
    with pytest.raises(UserError, match="2 artifacts are meant"):
        ArtifactRegistry(tmp_path).one("p/one", "key")
    assert ArtifactRegistry(tmp_path).one(two[0].title, "key") == two[0]


def test_the_index_can_be_lost_and_made_again(two: tuple[Artifact, Artifact], tmp_path: Path):
    whole, known = read_artifacts(tmp_path / NAME), ArtifactRegistry(tmp_path).artifacts
    (tmp_path / NAME).write_text("not JSON\n")
    assert ArtifactRegistry(tmp_path).artifacts == known
    note(RunDirectory(tmp_path / "p/one"), [replace(two[0], name="more", path="/m")], tmp_path)
    (tmp_path / NAME).unlink()
    assert ArtifactRegistry(tmp_path).rebuild() == len(whole) + 1
    assert {one.hash for one in read_artifacts(tmp_path / NAME)} == {one.hash for one in whole}


def test_a_run_that_was_removed_is_known_until_the_index_is_made_again(
    two: tuple[Artifact, Artifact], tmp_path: Path
):
    shutil.rmtree(tmp_path / "p/one")
    assert ArtifactRegistry(tmp_path).find("p/one")[0].hash == two[0].hash
    ArtifactRegistry(tmp_path).rebuild()
    assert [one.run for one in ArtifactRegistry(tmp_path).find("p/one")] == [two[1].run]


def test_an_export_elsewhere_is_known_by_its_own_note_wherever_it_is_copied(tmp_path: Path):
    made = export(begin(tmp_path, "p/one"), "1")
    rewrite_artifacts(tmp_path / "p/one/export" / NOTE, lambda: [made])
    shutil.copytree(tmp_path / "p/one/export", tmp_path / "copied")
    assert made_at(tmp_path / "copied") == replace(made, path=str(tmp_path / "copied"))
    (tmp_path / "copied" / "weights").write_text("2")
    assert "has other content" in (difference(made_at(tmp_path / "copied") or made) or "")


def test_what_lies_in_a_run_is_known_by_its_place(two: tuple[Artifact, Artifact], tmp_path: Path):
    assert made_at(tmp_path / "p/one/export") == two[0]
    assert made_at(tmp_path / "p/one") is None
    run = RunDirectory(tmp_path / "p/one")
    note(run, [replace(two[0], is_retired=True)], tmp_path)
    assert made_at(tmp_path / "p/one/export") is None


def test_what_is_noted_after_the_lists_were_read_is_in_the_index_that_is_made_again(
    two: tuple[Artifact, Artifact], tmp_path: Path
):
    registry = ArtifactRegistry(tmp_path)
    note(RunDirectory(tmp_path / "p/one"), [replace(two[0], name="late", path="/m")], tmp_path)
    registry.rebuild()
    assert "late" in {one.name for one in read_artifacts(tmp_path / NAME)}


@pytest.mark.parametrize("place", ["", "p/one"])
def test_a_list_with_a_line_too_few_is_told(
    two: tuple[Artifact, Artifact], tmp_path: Path, place: str
):
    file = tmp_path / place / NAME
    note(RunDirectory(tmp_path / "p/one"), [replace(two[0], name="more", path="/m")], tmp_path)
    assert ArtifactRegistry(tmp_path).damage() == {}
    file.write_text("".join(file.read_text().splitlines(keepends=True)[1:]))
    [(found, why)] = ArtifactRegistry(tmp_path).damage().items()
    assert found == str(file)
    assert "line 1 does not follow" in why
    assert run_verify(tmp_path, as_json=False) == 1


@pytest.mark.parametrize("line", ["{", "[]", '{"schema": 2}', "\x00\x00", '{"seal": "0"}'])
def test_one_damaged_line_hides_nothing_else(
    two: tuple[Artifact, Artifact], tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str
):
    file = tmp_path / "p/one" / NAME
    before = {one.hash for one in ArtifactRegistry(tmp_path).artifacts}
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([f"{line}\n", *lines]))
    commands: dict[str, Callable[[], int]] = {
        "list": lambda: run_list(tmp_path, as_json=True),
        "show": lambda: run_show(two[0].name, tmp_path, as_json=True),
        "verify": lambda: run_verify(tmp_path, as_json=True),
        "rebuild": lambda: run_rebuild(tmp_path),
    }
    for name, command in commands.items():
        assert command() == (1 if name == "verify" else 0)
        shown = capsys.readouterr()
        assert shown.err.count("note:") == 1, name
        assert f"{file}: line 1 " in shown.err
        wanted = {"verify": '"verified": 2', "rebuild": "3 lines"}.get(name, two[0].hash)
        assert wanted in shown.out
    assert {one.hash for one in ArtifactRegistry(tmp_path).artifacts} == before
    # What a configuration means by a name may be on the line that is left out.
    with pytest.raises(UserError, match="line 1 "):
        ArtifactRegistry(tmp_path).one(two[0].name, "actor_rollout_ref.model.path")
