"""Artifacts are known by content, and their lists only grow."""

import multiprocessing
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luyen.base.errors import UserError
from luyen.telemetry.artifact_lines import add_artifacts, current, read_artifacts
from luyen.telemetry.artifacts import (
    NOTE,
    Artifact,
    difference,
    hash_files,
    hash_of,
    require_unchanged,
)

NAMES = st.sampled_from(["a", "b", "c", "folder/d"])
FOLDERS = st.dictionaries(NAMES, st.binary(max_size=8), min_size=1)


def fill(folder: Path, files: dict[str, bytes]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


@given(one=FOLDERS, other=FOLDERS)
def test_two_folders_have_one_hash_just_when_they_hold_the_same(
    one: dict[str, bytes], other: dict[str, bytes], tmp_path_factory: pytest.TempPathFactory
):
    home = tmp_path_factory.mktemp("folders")
    fill(home / "one", one)
    fill(home / "elsewhere" / "other", other)
    hashes = [hash_of(hash_files(p)) for p in (home / "one", home / "elsewhere" / "other")]
    # The hash of one file alone is that of its content: what it is called does not count.
    alike = one == other or (len(one) == len(other) == 1 and [*one.values()] == [*other.values()])
    assert (hashes[0] == hashes[1]) == alike


def noted(path: Path, **changes: object) -> Artifact:
    files = hash_files(path)
    made = Artifact(
        kind="export", name="demo/a", hash=hash_of(files), path=str(path), run="r", files=files
    )
    return replace(made, **changes)


def test_what_is_unfinished_does_not_count(tmp_path: Path):
    fill(tmp_path, {"a": b"1", "b": b"2"})
    before = hash_files(tmp_path)
    fill(tmp_path / ".tmp-x", {"c": b"3"})
    assert hash_files(tmp_path) == before


def test_a_changed_file_is_named_though_its_size_and_time_are_as_before(tmp_path: Path):
    fill(tmp_path, {"a": b"1", "b": b"2"})
    one = noted(tmp_path)
    assert difference(one) is None
    seen = (tmp_path / "b").stat()
    (tmp_path / "b").write_bytes(b"3")
    os.utime(tmp_path / "b", ns=(seen.st_atime_ns, seen.st_mtime_ns))
    assert "/b has other content" in (difference(one) or "")
    (tmp_path / "b").unlink()
    assert "/b is missing" in (difference(one) or "")
    with pytest.raises(UserError, match="it is not as it was noted"):
        require_unchanged(one, "actor_rollout_ref.model.path")


@pytest.mark.parametrize("kind", ["export", "dataset", "reward_model"])
def test_an_added_file_is_named(tmp_path: Path, kind: str):
    fill(tmp_path, {"a": b"1", "b": b"2"})
    one = noted(tmp_path, kind=kind, parents=("sha256:ab",))
    fill(tmp_path / ".tmp-x", {"c": b"3"})
    (tmp_path / NOTE).write_text("what it says of itself")
    assert difference(one) is None
    (tmp_path / "chat_template.jinja").write_text("{{ 'other' }}")
    assert difference(one) == f"{tmp_path / 'chat_template.jinja'} was added"


def test_of_a_model_that_no_run_made_only_files_that_are_read_count(tmp_path: Path):
    fill(tmp_path, {"a": b"1", "b": b"2"})
    one = noted(tmp_path, kind="reward_model", used_as="reward.reward_model.model_path")
    (tmp_path / "README.md").write_text("words")
    assert difference(one) is None


def test_a_list_is_read_back_as_it_was_written(tmp_path: Path):
    fill(tmp_path / "export", {"a": b"1", "b": b"2"})
    file = tmp_path / "artifacts.jsonl"
    rows = Artifact(kind="dataset", name="x", hash="rows:ab", path="hf://x", run="r", used_as="k")
    two = [noted(tmp_path / "export", parents=("sha256:ab",), made="then"), rows]
    add_artifacts(file, two)
    assert read_artifacts(file) == two


def test_what_holds_already_is_not_noted_again(tmp_path: Path):
    fill(tmp_path / "export", {"a": b"1"})
    file, one = tmp_path / "artifacts.jsonl", noted(tmp_path / "export", made="first")
    add_artifacts(file, [one])
    add_artifacts(file, [replace(one, made="second")])
    assert [found.made for found in read_artifacts(file)] == ["first"]
    add_artifacts(file, [replace(one, is_retired=True)])
    add_artifacts(file, [replace(one, made="third")])
    assert [found.is_retired for found in read_artifacts(file)] == [False, True, False]
    assert [found.made for found in current(read_artifacts(file))] == ["third"]


def test_a_folder_that_was_moved_still_knows_its_files(tmp_path: Path):
    fill(tmp_path / "run" / "export", {"a": b"1", "b": b"2"})
    add_artifacts(tmp_path / "run" / "artifacts.jsonl", [noted(tmp_path / "run" / "export")])
    (tmp_path / "run").rename(tmp_path / "moved")
    [one] = read_artifacts(tmp_path / "moved" / "artifacts.jsonl")
    assert one.path == str(tmp_path / "moved" / "export")
    assert difference(one) is None


def test_a_torn_line_is_left_out_and_cut_off(tmp_path: Path):
    fill(tmp_path / "export", {"a": b"1"})
    file, one = tmp_path / "artifacts.jsonl", noted(tmp_path / "export")
    add_artifacts(file, [one])
    with file.open("ab") as handle:
        handle.write(b'{"kind": "exp')
    assert read_artifacts(file) == [one]
    add_artifacts(file, [replace(one, name="two", path=str(tmp_path))])
    assert [found.name for found in read_artifacts(file)] == ["demo/a", "two"]


def test_a_changed_line_is_refused(tmp_path: Path):
    fill(tmp_path / "export", {"a": b"1"})
    file = tmp_path / "artifacts.jsonl"
    add_artifacts(file, [noted(tmp_path / "export")])
    file.write_text(file.read_text().replace("demo/a", "demo/b"))
    with pytest.raises(UserError, match="line 1 is not as it was written"):
        read_artifacts(file)


def _add(file: Path, run: str) -> None:
    for number in range(20):
        one = Artifact(kind="dataset", name="x", hash="rows:a", path=f"{number}", run=run)
        add_artifacts(file, [one])


def test_several_processes_add_to_one_list(tmp_path: Path):
    file = tmp_path / "artifacts.jsonl"
    workers = [multiprocessing.Process(target=_add, args=(file, name)) for name in "abc"]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(read_artifacts(file)) == 60
