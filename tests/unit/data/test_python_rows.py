"""Rows given as Python objects are read back as the rows that they were."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from luyen.base.errors import UserError
from luyen.data import python_rows
from luyen.data.python_rows import are_addresses, is_dataset_dict, splits, write_rows
from luyen.data.sources import load_dataset, raw_rows
from tests.optional import needs

ROWS = [
    {"question": "1+1=", "answer": "2", "level": 1, "hint": ["one"]},
    {"question": "2+2=", "answer": "4", "level": 2, "hint": ["double", "add"]},
]


def read(path: Path) -> list[Any]:
    return [row for _, _, row in raw_rows(str(path))]


def test_dicts_are_read_back_as_they_were(tmp_path: Path):
    path = write_rows(ROWS, tmp_path, "train")
    assert (path.suffix, read(path)) == (".jsonl", ROWS)
    assert write_rows(iter(ROWS), tmp_path, "train") == path
    assert [p.ground_truth for p in load_dataset([str(path)]).prompts] == ["2", "4"]


def test_tables_are_read_back_as_they_were(tmp_path: Path):
    table = pa.Table.from_pylist(ROWS)
    arrow = write_rows(table, tmp_path, "train")
    assert (arrow.suffix, read(arrow)) == (".parquet", ROWS)
    assert read(write_rows(table.to_batches()[0], tmp_path, "train")) == ROWS
    frame = pd.DataFrame(ROWS[:1], index=pd.Index([7]))
    assert read(write_rows(frame, tmp_path, "train")) == ROWS[:1]


@needs("datasets")
def test_a_dataset_and_its_splits_are_read_back(tmp_path: Path):
    datasets = pytest.importorskip("datasets")
    whole = datasets.Dataset.from_list(ROWS)
    assert read(write_rows(whole.select([1]), tmp_path, "train")) == ROWS[1:]
    both = datasets.DatasetDict({"train": whole, "test": whole.select([0])})
    assert is_dataset_dict(both)
    train, held_out = splits(both)
    assert (len(train), len(held_out)) == (2, 1)
    with pytest.raises(UserError, match="no split `train`"):
        splits(datasets.DatasetDict({"test": whole}))


@needs("datasets")
def test_a_dataset_is_written_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(python_rows, "_PART", 1)
    turned = datasets.Dataset.from_list(ROWS).select([1, 0])
    path = write_rows(turned, tmp_path, "train")
    assert read(path) == ROWS[::-1]
    assert pq.ParquetFile(path).num_row_groups == 2
    assert write_rows(turned, tmp_path, "train") == path
    assert [found.name for found in tmp_path.iterdir()] == [path.name]
    with pytest.raises(UserError, match="there are no rows"):
        write_rows(turned.select([]), tmp_path, "train")


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ([], "there are no rows"),
        ([{"a": 1}, "text"], "row 2 is of type str"),
        ([{"a": object()}], "row 1 cannot be written"),
        ([{"a": float("nan")}], "row 1 cannot be written"),
        (3, "no list of rows"),
    ],
)
def test_what_is_no_row_is_named(tmp_path: Path, rows: Any, why: str):
    with pytest.raises(UserError, match=why):
        write_rows(rows, tmp_path, "train", field="data")
    assert not list(tmp_path.iterdir())


def test_names_of_files_are_told_from_rows():
    assert are_addresses([Path("a.jsonl"), "hf://org/name"])
    assert not are_addresses([])


class Raising:
    """Rows that end their reader."""

    def __iter__(self) -> Iterator[Any]:
        yield {"question": "1+1=", "answer": "2"}
        raise SystemExit(0)


class Unprintable(dict[str, Any]):
    def __repr__(self) -> str:
        raise RuntimeError("no")


def deep(levels: int) -> dict[str, Any]:
    row: dict[str, Any] = {}
    for _ in range(levels):
        row = {"a": row}
    return row


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (Raising(), "raised after 1 rows: SystemExit: 0"),
        ([Unprintable(a=object())], "row 1 cannot be written as JSON"),
        ([{"a": 1}, {"a": "\ud800"}], "row 2 cannot be written as JSON: 'utf-8'"),
        ([deep(5000)], "row 1 cannot be written as JSON: maximum recursion"),
        ([{"a": 10**5000}], "row 1 cannot be written as JSON: Exceeds the limit"),
        ([{"a": 1, 3: "x"}], "the key 3 is no text"),
        ([{"extra_info": [{1: "a", "1": "b"}]}], "the key 1 is no text"),
        ([{"extra_info": {True: "a"}}], "the key True is no text"),
    ],
)
def test_rows_that_cannot_be_written_as_they_are_are_refused(tmp_path: Path, rows: Any, said: str):
    with pytest.raises(UserError) as refused:
        write_rows(rows, tmp_path, "train")
    assert said in refused.value.why
    assert list(tmp_path.iterdir()) == []
