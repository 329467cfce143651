"""Files are whole or absent; lines survive, and damage is named."""

import json
import math
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.files import (
    _refuse_device,
    append,
    json_line,
    plain,
    read_json,
    read_lines,
    sync,
    write_whole,
)


def test_a_file_is_replaced_whole_and_nothing_else_stays(tmp_path: Path):
    write_whole(tmp_path / "a.txt", "one")
    write_whole(tmp_path / "a.txt", b"two")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.txt", "two")]


def test_a_failure_before_the_rename_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    write_whole(tmp_path / "a.txt", "old")

    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(UserError, match=r"a\.txt.*No space"):
        write_whole(tmp_path / "a.txt", "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.txt", "old")]


class Short(FileIO):
    """The last room of a disk: a part of what is written is taken."""

    def write(self, data: Any, /) -> int:
        return super().write(data[:-1])


def test_a_line_that_the_disk_does_not_take_whole_is_an_error_with_the_file(tmp_path: Path):
    full, short = FileIO("/dev/full", "ab"), Short(tmp_path / "a.jsonl", "ab")
    for file in (full, short):
        said = rf"{Path(str(file.name)).name}.*No space left"
        with file, pytest.raises(UserError, match=said):
            append(file, b"line\n")


def test_content_reaches_the_disk_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    order: list[str] = []
    replace = Path.replace

    def renamed(self: Path, target: Path) -> Path:
        order.append("rename")
        return replace(self, target)

    def synced(path: Path) -> None:
        order.append("folder" if path.is_dir() else "file")
        sync(path)

    monkeypatch.setattr(Path, "replace", renamed)
    monkeypatch.setattr("luyen.base.files.sync", synced)
    write_whole(tmp_path / "a.txt", "x")
    assert order == ["file", "rename", "folder"]


def test_floats_that_are_not_finite_come_back_from_standard_json():
    values = {"a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.1, "e": 5e-324}
    read = json.loads(json_line(values))
    assert math.isnan(float(read["a"]))
    assert [float(read[n]) for n in "bcde"] == [math.inf, -math.inf, 0.1, 5e-324]
    assert plain([math.nan, "nan", True, None]) == ["nan", "nan", True, None]


def test_equal_content_gives_equal_lines():
    assert json_line({"b": 1, "a": 2}) == json_line({"a": 2, "b": 1}) == '{"a": 2, "b": 1}\n'


def test_a_torn_last_line_is_left_out(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3')
    assert read_lines(path) == [{"step": 1}, {"step": 2}]
    path.write_text('{"step": 1}\n{"step": 2}')
    assert read_lines(path) == [{"step": 1}], "a line without its newline is not whole"


@pytest.mark.parametrize("damage", ['{"step": 2', "", "[2]", "\x00\x00"])
def test_damage_elsewhere_names_the_line(tmp_path: Path, damage: str):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"step": 1}}\n{damage}\n{{"step": 3}}\n')
    with pytest.raises(UserError, match=r"a\.jsonl.*line 2 is damaged"):
        read_lines(path)


@pytest.mark.parametrize(
    ("text", "why"), [(None, "missing"), ("{", "damaged"), ("[1]", "no JSON object")]
)
def test_a_missing_or_damaged_object_is_named(tmp_path: Path, text: str | None, why: str):
    path = tmp_path / "m.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=rf"m\.json.*{why}"):
        read_json(path)


@pytest.mark.parametrize("place", ["/dev/null", "/dev/stdout", "/dev/new"])
def test_a_device_is_refused(place: str):
    """Root would replace it by a file, for every process of the machine."""
    with pytest.raises(UserError, match="it is a device"):
        _refuse_device(Path(place))


def test_a_link_to_a_device_is_refused_and_stays(tmp_path: Path):
    link = tmp_path / "link"
    link.symlink_to("/dev/null")
    with pytest.raises(UserError, match="it is a device"):
        write_whole(link, "text")
    assert link.is_symlink()
