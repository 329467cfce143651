"""Artifacts are known by content, and their lists only grow."""

import multiprocessing
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luyen.base.errors import UserError
from luyen.telemetry.artifacts import (
    NOTE,
    Artifact,
    add_artifacts,
    current,
    damage,
    difference,
    hash_files,
    hash_of,
    not_noted,
    read_artifacts,
    require_unchanged,
    rewrite_artifacts,
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


def test_what_holds_already_is_known_to_be_noted(tmp_path: Path):
    fill(tmp_path / "export", {"a": b"1"})
    file, one = tmp_path / "artifacts.jsonl", noted(tmp_path / "export", made="first")
    assert not_noted(file, [one]) == [one]
    add_artifacts(file, [one])
    assert not_noted(file, [replace(one, made="second")]) == []
    add_artifacts(file, [replace(one, is_retired=True)])
    add_artifacts(file, not_noted(file, [replace(one, made="third")]))
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


def row(number: int, run: str = "r") -> Artifact:
    return Artifact(kind="dataset", name="x", hash="rows:a", path=f"{number}", run=run)


def bytes_read() -> int:
    """What this process has read so far, by the kernel's own count."""
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


def test_a_note_reads_as_much_of_a_long_list_as_of_a_short_one(tmp_path: Path):
    def cost(lines: int) -> int:
        file = tmp_path / f"{lines}.jsonl"
        add_artifacts(file, [row(0)])
        file.write_bytes(file.read_bytes() * lines)
        before = bytes_read()
        add_artifacts(file, [row(1)])
        return bytes_read() - before

    short, long = cost(1_000), cost(100_000)
    assert long < 1.1 * short < 200_000, "32 MB are there to be read"


def test_a_line_longer_than_what_is_read_at_first_is_found(tmp_path: Path):
    file = tmp_path / "artifacts.jsonl"
    big = replace(row(1), parents=tuple(f"sha256:{n:064x}" for n in range(3000)))
    add_artifacts(file, [row(0)])
    add_artifacts(file, [big])
    add_artifacts(file, [row(2)])
    assert read_artifacts(file) == [row(0), big, row(2)]
    assert damage(file) is None


@pytest.mark.parametrize("gone", [0, 1])
def test_a_removed_line_breaks_the_chain(tmp_path: Path, gone: int):
    file = tmp_path / "artifacts.jsonl"
    add_artifacts(file, [row(0), row(1)])
    add_artifacts(file, [row(2)])
    assert damage(file) is None
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(line for i, line in enumerate(lines) if i != gone))
    assert f"line {gone + 1} does not follow" in (damage(file) or "")
    assert len(read_artifacts(file)) == 2


def test_lines_of_the_version_without_a_chain_are_read_and_gone_on_from(tmp_path: Path):
    file = tmp_path / "artifacts.jsonl"
    file.write_text(
        '{"files": {}, "hash": "rows:a", "is_retired": false, "kind": "dataset", "made": "", '
        '"name": "x", "parents": [], "path": "0", "run": "r", "schema": 1, '
        '"seal": "c65ad68acbe9b826", "used_as": null}\n'
    )
    add_artifacts(file, [row(1)])
    assert read_artifacts(file) == [row(0), row(1)]
    assert damage(file) is None


def test_a_list_with_a_damaged_end_is_left_as_it_is(tmp_path: Path):
    file = tmp_path / "artifacts.jsonl"
    file.write_text("no JSON\n")
    with pytest.raises(UserError, match="its last line is damaged"):
        add_artifacts(file, [row(1)])
    assert file.read_text() == "no JSON\n"


def test_what_is_added_while_a_list_is_put_in_its_place_is_not_lost(tmp_path: Path):
    file = tmp_path / "artifacts.jsonl"
    add_artifacts(file, [row(0, "before")])
    workers = [multiprocessing.Process(target=_add, args=(file, name)) for name in "abc"]

    def slowly() -> list[Artifact]:
        for worker in workers:
            worker.start()
        time.sleep(0.3)  # all of them wait for the file that is about to be replaced
        return [row(0, "anew")]

    rewrite_artifacts(file, slowly)
    for _ in range(20):
        rewrite_artifacts(file, lambda: current(read_artifacts(file)))
    for worker in workers:
        worker.join()
    runs = [one.run for one in current(read_artifacts(file))]
    assert {name: runs.count(name) for name in (*"abc", "anew")} == {
        "a": 20, "b": 20, "c": 20, "anew": 1,
    }  # fmt: skip
    assert damage(file) is None


def test_a_pipe_in_the_place_of_an_artifact_is_not_waited_for(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("{}")
    files = hash_files(rows)
    made = Artifact(
        kind="dataset", name="rows", hash=hash_of(files), path=str(rows), run="r", files=files
    )
    rows.unlink()
    os.mkfifo(rows)
    assert difference(made) == f"{rows} cannot be read: it is a named pipe, not a file"
