"""Where rows come from: files, directories, saved datasets, and a fingerprint of what they say."""

import json
import sys
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from luyen.base.errors import UserError
from luyen.config.plugins import SOURCES
from luyen.data.rows import Columns
from luyen.data.sources import SCHEMES, load_dataset
from tests.unit.data.templates import user

ROWS: list[dict[str, Any]] = [
    {
        "prompt": [user("1+1=")],
        "data_source": "s",
        "reward_model": {"ground_truth": "2"},
        "extra_info": {"index": 0, "hint": "easy"},
    },
    {"prompt": [user("é")], "data_source": "s", "extra_info": {"index": 1}},
]


def write(path: Path, rows: list[Any]) -> Path:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("\n\n".join(json.dumps(row) for row in rows) + "\n")
    return path


@pytest.mark.parametrize("ending", ["parquet", "json", "jsonl"])
def test_the_same_rows_are_the_same_prompts_whatever_the_format(ending: str, tmp_path: Path):
    path = write(tmp_path / f"rows.{ending}", ROWS)
    found = load_dataset([str(path)])
    like = load_dataset([str(write(tmp_path / "other.jsonl", ROWS))])
    assert [p.messages[0]["content"] for p in found.prompts] == ["1+1=", "é"]
    assert [p.uid for p in found.prompts] == [p.uid for p in like.prompts]
    assert found.prompts[0].ground_truth == "2"
    assert found.prompts[1].extra_info == {"index": 1}
    assert found.fingerprint == like.fingerprint
    assert found.counts == {"read": 2}


def test_a_row_is_named_by_its_line_or_its_place(tmp_path: Path):
    lines = write(tmp_path / "rows.jsonl", ROWS)
    table = write(tmp_path / "rows.parquet", ROWS)
    assert load_dataset([str(lines)]).origins == (f"{lines} row 1", f"{lines} row 3")
    assert load_dataset([str(table)]).origins == (f"{table} row 1", f"{table} row 2")


def test_the_fingerprint_changes_with_a_word_with_the_order_and_not_with_key_order(tmp_path: Path):
    def fingerprint(rows: list[Any]) -> str:
        return load_dataset([str(write(tmp_path / "r.jsonl", rows))]).fingerprint

    same = fingerprint([dict(reversed(row.items())) for row in ROWS])
    assert same == fingerprint(ROWS)
    assert fingerprint(ROWS[::-1]) != same
    assert fingerprint([ROWS[0], {**ROWS[1], "extra_info": {"index": 2}}]) != same


def test_files_add_up_in_the_order_given(tmp_path: Path):
    one = str(write(tmp_path / "a.jsonl", ROWS[:1]))
    two = str(write(tmp_path / "b.jsonl", ROWS[1:]))
    both, turned = load_dataset([one, two]), load_dataset([two, one])
    assert [s.rows for s in both.sources] == [1, 1]
    assert both.prompts == turned.prompts[::-1]
    assert both.fingerprint != turned.fingerprint


def test_a_limit_keeps_the_first_rows_and_fingerprints_all(tmp_path: Path):
    path = str(write(tmp_path / "a.jsonl", ROWS))
    few = load_dataset([path], most=1)
    assert [p.messages[0]["content"] for p in few.prompts] == ["1+1="]
    assert few.fingerprint == load_dataset([path]).fingerprint
    assert few.counts == {"read": 2}


def test_plain_text_that_was_allowed_is_counted(tmp_path: Path):
    path = str(write(tmp_path / "a.jsonl", [{"q": "1+1="}, {"messages": [user("a")]}]))
    found = load_dataset([path], Columns(prompt="q", string_prompts="user"))
    assert found.counts == {"read": 2, "plain text made a user message": 1}


def test_a_directory_of_files_is_read_in_order_of_name(tmp_path: Path):
    write(tmp_path / "b.jsonl", ROWS[1:])
    write(tmp_path / "a.json", ROWS[:1])
    (tmp_path / "notes.txt").write_text("not rows")
    found = load_dataset([str(tmp_path)])
    assert [p.messages[0]["content"] for p in found.prompts] == ["1+1=", "é"]
    assert found.origins[1] == f"{tmp_path / 'b.jsonl'} row 1"


def test_a_dataset_saved_to_disk_is_read_and_one_of_several_splits_must_be_named(tmp_path: Path):
    plain = [{"prompt": row["prompt"], "data_source": "s"} for row in ROWS]
    rows = datasets.Dataset.from_list(plain)
    datasets.DatasetDict(train=rows, test=rows).save_to_disk(str(tmp_path / "both"))
    found = load_dataset([str(tmp_path / "both" / "train")])
    assert [p.messages[0]["content"] for p in found.prompts] == ["1+1=", "é"]
    with pytest.raises(UserError, match=r"several splits.*both/test or .*both/train"):
        load_dataset([str(tmp_path / "both")])


def test_a_hub_dataset_is_asked_for_by_name_split_and_revision(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def scripted(name: str, config: str | None, *, split: str, revision: str | None) -> Any:
        asked.append((name, config, split, revision))
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", scripted)
    found = load_dataset(["hf://org/sums?split=test&config=main&revision=v1"])
    assert asked == [("org/sums", "main", "test", "v1")]
    assert len(found.prompts) == 2
    load_dataset(["hf://org/sums"])
    assert asked[1] == ("org/sums", None, "train", None)
    with pytest.raises(UserError, match=r"unknown key `splt`.*did you mean `split`"):
        load_dataset(["hf://org/sums?splt=test"])


def test_a_hub_dataset_may_be_named_with_revision_and_split(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []

    def scripted(name: str, config: str | None, *, split: str, revision: str | None) -> Any:
        asked.append((name, config, split, revision))
        return ROWS

    monkeypatch.setattr(datasets, "load_dataset", scripted)
    for address in ("hf://org/sums@v1", "hf://org/sums@v1:test", "hf://org/sums:test?config=main"):
        load_dataset([address])
    assert asked == [
        ("org/sums", None, "train", "v1"),
        ("org/sums", None, "test", "v1"),
        ("org/sums", "main", "test", None),
    ]
    with pytest.raises(UserError, match="`revision` is given twice"):
        load_dataset(["hf://org/sums@v1?revision=v2"])
    with pytest.raises(UserError, match="`revision` has no value"):
        load_dataset(["hf://org/sums@"])


def test_a_hub_dataset_that_cannot_be_had_is_an_error(monkeypatch: pytest.MonkeyPatch):
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise OSError("no such dataset\nmore")

    monkeypatch.setattr(datasets, "load_dataset", refuse)
    with pytest.raises(UserError, match=r"cannot be loaded: no such dataset\. Fix"):
        load_dataset(["hf://org/sums"])


def test_a_missing_package_names_the_extra_that_brings_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install \"luyen\[datasets\]\""):
        load_dataset(["hf://org/sums"])
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(UserError, match=r"pip install \"luyen\[tasks\]\""):
        load_dataset(["reasoning_gym://products"])


def test_check_knows_every_source():
    assert set(SCHEMES) == set(SOURCES)


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("rows.csv", "a,b", "no reader for files that end in `.csv`"),
        ("rows.jsonl", '{"prompt": []}\n{"pro', "line 2 is not valid JSON"),
        ("rows.json", "[1", "not valid JSON"),
        ("rows.json", '{"data": []}', "holds one list"),
        ("rows.parquet", "no parquet", "not a parquet file"),
        ("rows.jsonl", "\n", "there are no rows in it"),
    ],
)
def test_a_file_that_cannot_be_read_says_why(name: str, content: str, why: str, tmp_path: Path):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as caught:
        load_dataset([str(tmp_path / name)])
    assert why in caught.value.why
    assert str(tmp_path / name) in str(caught.value.value)


def test_bytes_that_are_no_text_are_refused(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_bytes(b"\xff\xfe{}")
    with pytest.raises(UserError, match="cannot be read"):
        load_dataset([str(tmp_path / "rows.jsonl")])


def test_an_address_that_leads_nowhere_is_refused(tmp_path: Path):
    with pytest.raises(UserError, match="no such file"):
        load_dataset([str(tmp_path / "rows.jsonl")])
    with pytest.raises(UserError, match="did you mean `arithmetic`"):
        load_dataset(["arithmetik://sum"])
    with pytest.raises(UserError, match="neither a saved dataset nor files"):
        load_dataset([str(tmp_path)])
