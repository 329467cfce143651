"""Files of somebody else are read, or refused with a reason; no depth ends the process."""

import json
from pathlib import Path

import pytest

from luyen.base.digests import page_with_checksum, without_checksum
from luyen.base.errors import UserError
from luyen.base.files import json_page, read_json, read_lines, write_whole
from luyen.base.input_files import DEEPEST, parse_json, parse_yaml


def nested(depth: int, opened: str = "[", closed: str = "]") -> str:
    return opened * depth + closed * depth


@pytest.mark.parametrize("depth", [DEEPEST + 1, 500, 950, 5_000, 100_000])
def test_what_is_too_deep_is_a_value_error(depth: int):
    for text in (nested(depth), nested(depth, '{"a":', "}").replace(":}", ":1}", 1)):
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(text)
        with pytest.raises(ValueError, match="nested too deeply"):
            parse_json(text.encode())
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_yaml(f"a: {nested(depth)}")


def test_what_is_as_deep_as_may_be_is_read_and_its_seal_compared(tmp_path: Path):
    value = {"a": parse_json(nested(DEEPEST - 1)), "wide": [[i] for i in range(10_000)]}
    text = json.dumps(value)
    assert parse_json(text) == value
    assert parse_yaml(f"a: {nested(DEEPEST - 1)}")["a"] == value["a"]
    page = parse_json(page_with_checksum(value))
    assert without_checksum(page, tmp_path, is_demanded=True) == value


def test_aliases_are_refused_before_anything_is_built():
    bomb = "a: &a [1, 2]\n" + "".join(f"b{i}: [*a, *a]\n" for i in range(3))
    with pytest.raises(ValueError, match="alias"):
        parse_yaml(bomb)
    with pytest.raises(ValueError, match="no YAML"):
        parse_yaml("a: [1")


def test_files_that_are_too_deep_or_cannot_be_read_are_named(tmp_path: Path):
    page, lines = tmp_path / "page.json", tmp_path / "lines.jsonl"
    page.write_text('{"a": ' + nested(100_000) + "}")
    lines.write_text('{"step": 1}\n{"a": ' + nested(100_000) + "}\n")
    with pytest.raises(UserError, match=r"page\.json.*nested too deeply"):
        read_json(page)
    with pytest.raises(UserError, match=r"lines\.jsonl.*line 2 is damaged"):
        read_lines(lines)
    for read in (read_json, read_lines):
        with pytest.raises(UserError, match="it is a directory"):
            read(tmp_path)


def test_a_path_that_is_no_utf_8_is_written_and_read_back(tmp_path: Path):
    value = {"folder": "runs/\udcff/é"}
    write_whole(tmp_path / "page.json", json_page(value))
    assert read_json(tmp_path / "page.json") == value
