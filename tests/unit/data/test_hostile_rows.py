"""Rows that mean harm: each is refused soon, with its file and its number, or read as it is."""

import io
import json
import os
import resource
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luyen.base.errors import UserError
from luyen.config.check import check
from luyen.config.machine import Machine
from luyen.config.schema.data import DataConfig
from luyen.data.build import TrainData, build_data
from luyen.data.formats.detect import Kind
from luyen.data.offline import build_offline_data
from luyen.data.sources import read_file
from luyen.data.tokenizer import load_tokenizer

TOKENIZER = load_tokenizer("builtin://arithmetic")
LAPTOP = Machine(cpus=2, ram_bytes=16 * 1024**3)
SECONDS = 10.0
ASKED = [{"role": "user", "content": "1+1="}]
NINES = "9" * 6000
DEEP = "[" * 100_000 + "]" * 100_000


def line(**columns: Any) -> str:
    row = {"prompt": ASKED, "data_source": "x", "reward_model": {"ground_truth": "2"}, **columns}
    return json.dumps(row) + "\n"


def built(path: Path, **keys: Any) -> TrainData:
    """What training makes of a file of validation rows, within a time."""
    began = time.monotonic()
    files = {"train_files": ("arithmetic://sum?size=2",), "val_files": (str(path),)}
    try:
        data = DataConfig(**{"max_prompt_length": 64, **files, **keys})
        return build_data(data, tokenizer=TOKENIZER)
    finally:
        assert time.monotonic() - began < SECONDS


def parquet(table: pa.Table) -> bytes:
    written = io.BytesIO()
    pq.write_table(table, written)
    return written.getvalue()


SOUND = parquet(pa.table({"prompt": [ASKED], "data_source": ["x"]}))
TWICE = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
RAW = '{"prompt": [{"role": "user", "content": "1"}], "x": '

LINES = {
    "half a character": (line(prompt=[{"role": "user", "content": "a\ud800"}]), r"row 2: prompt"),
    "half in a name": (line(**{"\ud800": 1}), r"row 2: \\ud800 .*half of a character"),
    "half in text": (line(tools='[{"name": "a\\ud800"}]'), r"row 2: tools .*half of a character"),
    "6,000 digits": (f"{RAW}{NINES}}}", r"line 2 is not valid JSON: a number in it has more"),
    "digits in text": (line(extra_info=f'{{"a": {NINES}}}'), r"row 2: extra_info .*more digits"),
    "deep": (f"{RAW}{DEEP}}}", r"line 2 .*nested more than 100 levels deep"),
    "less deep": (f"{RAW}{'[' * 300}{']' * 300}}}", r"row 2: x .*nested more than 100 levels"),
    "deep text": (line(extra_info=DEEP), r"row 2: extra_info .*nested more than 100 levels"),
    "a key twice": ('{"prompt": [], "prompt": []}', r"line 2 .*`prompt` stands in it twice"),
    "no object": ("[1, 2]", r"row 2: row = \[1, 2\]: a row is an object"),
    "a role of one's own": (
        line(prompt=[{"role": "me", "content": "1"}]),
        r"row 2: .*no such role",
    ),
    "a role that is a list": (line(prompt=[{"role": ["user"], "content": ""}]), r"no such role"),
    "a picture": (
        line(prompt=[{"role": "user", "content": [{"type": "image"}]}]),
        r"row 2: .*text",
    ),
    "a number to say": (line(prompt=[{"role": "user", "content": 5}]), r"row 2: .*content"),
    "a list of truths": (line(reward_model=[1]), r"row 2: reward_model"),
    "a source that is none": (line(data_source=5), r"row 2: data_source"),
    "tools that name nothing": (line(tools=[{"a": 1}]), r"row 2: tools\[0\]"),
}


@pytest.mark.parametrize("name", LINES)
def test_a_row_is_refused_with_its_file_and_number(name: str, tmp_path: Path) -> None:
    text, said = LINES[name]
    path = tmp_path / "rows.jsonl"
    path.write_text(line() + text)
    with pytest.raises(UserError, match=rf"(?s)rows\.jsonl.*{said}") as caught:
        built(path)
    assert len(str(caught.value)) < 1000
    assert not caught.value.field.startswith("data.train_files")


FILES: dict[str, tuple[str, bytes, str]] = {
    "empty": ("a.jsonl", b"", "there are no rows in it"),
    "blank": ("a.jsonl", b"\n\n", "there are no rows in it"),
    "torn": ("a.json", b"[{", "not valid JSON"),
    "deep": ("a.json", DEEP[:100_000].encode(), "nested more than 100 levels"),
    "an object": ("a.json", b"{}", "holds one list"),
    "latin": ("a.jsonl", b'{"a": "\xe9"}', "cannot be read: 'utf-8' codec"),
    "compressed": ("a.jsonl.gz", b"\x1f\x8b", "no reader for files that end in `.gz`"),
    "cut": ("a.parquet", SOUND[:-20], "not a parquet file"),
    "noise": ("a.parquet", b"PAR1" + b"\0" * 50 + b"PAR1", "cannot be read: Couldn't deserialize"),
    "changed": ("a.parquet", SOUND[:30] + b"\xff\xff" + SOUND[32:], "cannot be read|not a parquet"),
    "text": ("a.parquet", b"hello", "not a parquet file"),
    "two columns": ("a.parquet", parquet(TWICE), "the column `prompt` is there twice"),
    "a table": ("a.csv", b"prompt,completion\n1,2\n", "no reader for files that end in `.csv`"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_is_refused_under_the_key_that_names_it(name: str, tmp_path: Path) -> None:
    ending, data, said = FILES[name]
    path = tmp_path / ending
    path.write_bytes(data)
    with pytest.raises(UserError, match=said) as caught:
        built(path)
    assert (caught.value.field, caught.value.value) == ("data.val_files", str(path))


def test_a_table_with_a_column_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion,prompt\n1,2,3\n")
    with pytest.raises(UserError, match=r"data\.train_files.*the column `prompt` is there twice"):
        build_offline_data(
            DataConfig(train_files=(str(path),)), kinds=(Kind.CONVERSATION,), tokenizer=TOKENIZER
        )


def test_truths_of_odd_types_reach_the_reward_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    odd = [datetime(2026, 1, 2), datetime(2026, 1, 3)]
    table = pa.table({"prompt": [ASKED] * 2, "truth": odd, "raw": [b"\xff", None]})
    path.write_bytes(parquet(table))
    found = built(path, train_files=(str(path),), ground_truth_key="truth", filter_duplicates=False)
    assert [prompt.ground_truth for prompt in found.train.prompts] == odd


def test_a_schema_that_points_to_itself_is_rendered_as_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    schema = {"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}
    path.write_text(line(tools=[schema]))
    found = built(path, max_prompt_length=512)
    assert found.validation is not None
    assert found.validation.prompts[0].tools == (schema,)


@pytest.mark.parametrize("truncation", [None, "error", "left", "right", "middle"])
def test_a_prompt_of_20_million_characters_is_not_read(
    truncation: str | None, tmp_path: Path
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(line() + line(prompt=[{"role": "user", "content": "1 " * 10_000_000}]))
    keys = {"filter_overlong_prompts": False, "truncation": truncation} if truncation else {}
    if truncation == "error":
        with pytest.raises(UserError, match=r"row 2: prompt = 'at least \d+ tokens': more than 64"):
            built(path, **keys)
        return
    found = built(path, **keys).validation
    assert found is not None
    assert found.counts == {"read": 2, "truncated" if truncation else "overlong": 1}
    assert all(len(str(p.messages[0]["content"])) < 64 for p in found.prompts)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("arithmetic://sum?size=0", "`size=0` is no whole number from 1 to"),
        ("arithmetic://sum?size=-5", "`size=-5` is no whole number from 1 to"),
        ("arithmetic://sum?size=--5", "`size=--5` is no whole number"),
        (f"arithmetic://sum?size={NINES}", "is no whole number from 1 to"),
        ("arithmetic://sum?digits=10", "`digits=10` is no whole number from 1 to 9"),
        ("arithmetic://", "no operation ``"),
        ("arithmetic://sum?size=100000&digits=9&traces=1000", "more than 1,000,000 rows"),
        ("arithmetic://sum?pairs=odd", "`pairs=odd` is not a choice"),
        ("arithmetic://sum?traces=1&pairs=even", "traces and pairs ask for different rows"),
        ("arithmetic://product?steps=1", "only sums are worked out in steps"),
        ("arithmetic://sum?noise=nan", "`noise=nan` is not between 0 and 1"),
        ("tools://both?size=0", "`size=0` is no whole number"),
        ("tools://calculator?digits=0", "`digits=0` is no whole number"),
        ("tools://orders?traces=1001", "`traces=1001` is no whole number from 0 to 1000"),
        ("tools://none", "no task `none`"),
        ("hf://", "no dataset is named"),
        ("hf://a/b?spilt=x", "unknown key `spilt`"),
        ("{HERE}", "the directory holds neither a saved dataset nor files of rows"),
        ("{HERE}/empty.jsonl", "there are no rows in it"),
        ("{HERE}/rows.txt", "no reader for files that end in `.txt`"),
        ("{HERE}/pipe.jsonl", "cannot be read: it is a named pipe, not a file"),
        ("{HERE}/loop.jsonl", "no such file on this machine"),
        ("~nobody-of-this-name/rows.jsonl", "no such file on this machine"),
        ("a\0b.jsonl", "no such file on this machine"),
        ("x" * 5000, "no such file on this machine"),
    ],
)
@pytest.mark.parametrize("key", ["train_files", "val_files"])
def test_check_refuses_an_address_as_training_does_and_in_its_words(
    address: str, said: str, key: str, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    address = address.replace("{HERE}", str(empty if address == "{HERE}" else tmp_path))
    empty.mkdir()
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "rows.txt").write_text("{}")
    os.mkfifo(tmp_path / "pipe.jsonl")
    (tmp_path / "loop.jsonl").symlink_to(tmp_path / "loop.jsonl")
    files = {"train_files": ("arithmetic://sum?size=2",), key: (address,)}
    with pytest.raises(UserError) as caught:
        build_data(DataConfig(**files), tokenizer=TOKENIZER)
    assert caught.value.field == f"data.{key}"
    assert said in caught.value.why
    words = [f"data.{name}={json.dumps(paths)}" for name, paths in files.items()]
    found = [p for p in check([], words, machine=LAPTOP).problems if p.id == "D02"]
    assert [(p.field, p.fix) for p in found] == [(f"data.{key}", caught.value.fix)]
    assert found[0].why == f"{caught.value.value}: {caught.value.why}"


def test_a_directory_of_many_files_is_looked_through_soon(tmp_path: Path) -> None:
    for i in range(20_000):
        (tmp_path / f"{i}.txt").touch()
    (tmp_path / "rows.jsonl").write_text(line())
    found = built(tmp_path).validation
    assert found is not None
    assert len(found.prompts) == 1


@pytest.mark.parametrize(("ending", "why"), [("jsonl", "line 2 has more than"), ("json", "whole")])
def test_a_file_of_five_gigabytes_of_nothing_is_not_read_into_memory(
    ending: str, why: str, tmp_path: Path
) -> None:
    """Such a file takes no room on the disk, nor in a packed archive."""
    path = tmp_path / f"rows.{ending}"
    path.write_text(line())
    os.truncate(path, 5 * 2**30)
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 3 * 2**30, before[1]))
    try:
        with pytest.raises(UserError, match=why):
            list(read_file(path))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
