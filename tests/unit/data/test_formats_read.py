"""Reading rows: every file gives the same ones, none is lost, and what is wrong is said."""

import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from luyen.base.errors import UserError
from luyen.data.formats.read import open_rows, read_labelled
from tests.unit.data.format_cases import CASES, said, write
from tests.unit.data.templates import assistant, user

BROKEN: list[tuple[str, dict[str, Any], str, str]] = [
    ("TRL, text", {"rejected": None}, "rejected", "no such column"),
    ("TRL, text", {"rejected": 3}, "rejected", "a conversation is a list of messages"),
    ("TRL, messages", {"chosen": [user("a")]}, "chosen", "this one does not"),
    ("TRL, messages", {"margin": "much"}, "margin", "holds a number"),
    ("TRL, messages", {"margin": float("inf")}, "margin", "not finite"),
    ("TRL, messages", {"tools": "[{"}, "tools", "must be JSON"),
    ("TRL, messages", {"chat_template_kwargs": [1]}, "chat_template_kwargs", "an object"),
    ("TRL, messages", {"images": ["a.png"]}, "images", "trains text models"),
    ("TRL, implicit prompt", {"chosen": [user("z"), assistant("a")]}, "rejected", "no common"),
    ("TRL, implicit prompt", {"chosen": "plain"}, "chosen", "where the answer begins"),
    ("TRL, implicit prompt", {"prompt": "z"}, "prompt", "begin with another prompt"),
    ("unpaired", {"completion": "a\ud800"}, "completion", "half of a character"),
    ("unpaired", {"label": "maybe"}, "label", "true or false"),
    ("unpaired", {"completion": [user("a")]}, "completion", "begins with the assistant"),
    ("stepwise", {"labels": [True]}, "labels", "3 steps and 1 labels"),
    ("stepwise", {"labels": [True, 7, None]}, "labels", "from 0 to 1"),
    ("stepwise", {"completions": [1]}, "completions", "a list of texts"),
    ("messages", {"messages": [user("q")]}, "messages", "nothing to learn"),
    ("messages", {"messages": "not JSON"}, "messages", "must be JSON"),
    ("messages", {"messages": [{"content": "q"}]}, "messages[0]", "the message has no role"),
    (
        "messages",
        {"messages": [{**user("q"), "weight": 1}, assistant("a")]},
        "messages[0].weight",
        "only what the assistant says",
    ),
    (
        "messages",
        {"messages": [user("q"), {**assistant("a"), "weight": -1}]},
        "messages[1].weight",
        "a number from 0",
    ),
    (
        "messages",
        {"messages": [user("q"), {**assistant("a"), "train_detail": [{"begin_offset": 0}]}]},
        "messages[1].train_detail",
        "only whole messages",
    ),
    (
        "ShareGPT with tools",
        {"conversations": [said("humam", "q")]},
        "conversations[0].from",
        "no such speaker",
    ),
    (
        "ShareGPT with tools",
        {"conversations": [said("human", "q"), said("function_call", "add(1)")]},
        "conversations[1].value",
        "valid JSON",
    ),
    ("ShareGPT, judged", {"messages": [user("q")]}, "messages", "the assistant says it"),
    ("alpaca", {"output": 5}, "output", "holds text"),
    ("alpaca", {"history": [["q"]]}, "history[0]", "pairs of a question and an answer"),
]


@pytest.mark.parametrize(("case", "change", "column", "why"), BROKEN)
def test_a_problem_has_file_row_column_reason_and_fix(
    case: str, change: dict[str, Any], column: str, why: str, tmp_path: Path
):
    _, good, _ = CASES[case]
    path = write(tmp_path / "rows.jsonl", [good, {**good, **change}])
    with pytest.raises(UserError, match=r"rows\.jsonl row 2") as found:
        list(open_rows(path, string_prompts="user"))
    assert found.value.field == f"{path} row 2: {column}"
    assert why in found.value.why
    assert found.value.fix

    reading = open_rows(path, string_prompts="user", on_problem="skip")
    assert len(list(reading)) == 1
    assert [(p.at.number, p.column) for p in reading.problems] == [(2, column)]
    assert (reading.counts["read"], reading.counts["left out"]) == (2, 1)


def test_no_row_is_lost_in_a_long_file_and_rows_come_as_they_are_asked_for(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", [{"text": str(i)} for i in range(200)])
    assert [row.text for _, row in open_rows(path)] == [str(i) for i in range(200)]
    reading = open_rows(path)
    next(iter(reading))
    assert reading.counts["read"] == 1


@pytest.mark.parametrize("sound", [0, 1, 100])
def test_a_file_that_breaks_off_says_so(sound: int, tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", [{"text": "a"}] * sound)
    with Path(path).open("a") as file:
        file.write('{"text": \n{"text": "b"}\n')
    with pytest.raises(UserError, match=f"line {sound + 1} is not valid JSON"):
        list(open_rows(path))
    if sound:
        reading = open_rows(path, on_problem="skip")
        assert len(list(reading)) == sound
        assert reading.torn is not None


def test_every_kind_of_file_gives_the_same_rows(tmp_path: Path):
    raws = [{"prompt": "q, \n", "completion": "a", "label": i == 1} for i in range(3)]
    lines = write(tmp_path / "rows.jsonl", raws)
    (tmp_path / "rows.json").write_text(json.dumps(raws))
    table = pyarrow.Table.from_pylist(raws)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.csv").write_text(
        "prompt,completion,label\n" + "".join(f'"q, \n",a,{i == 1}\n' for i in range(3))
    )
    datasets.Dataset.from_list(raws).save_to_disk(str(tmp_path / "saved"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "part.csv").write_text((tmp_path / "rows.csv").read_text())
    expected = [row for _, row in read_labelled(lines, string_prompts="user")]
    assert [row.label for row in expected] == [False, True, False]
    for name in ("rows.json", "rows.parquet", "rows.csv", "saved", "folder"):
        found = read_labelled(str(tmp_path / name), string_prompts="user")
        assert [row for _, row in found] == expected


def test_a_table_with_a_cell_too_many_is_refused(tmp_path: Path):
    path = tmp_path / "rows.csv"
    path.write_text("text\nabc, or so\n")
    with pytest.raises(UserError, match="line 2 has another number of cells"):
        list(open_rows(str(path)))


def test_a_missing_and_an_empty_file_are_named(tmp_path: Path):
    with pytest.raises(UserError, match=r"FILE = .*no such file"):
        open_rows(str(tmp_path / "none.jsonl"))
    with pytest.raises(UserError, match="there are no rows"):
        open_rows(write(tmp_path / "a.jsonl", []))
    with pytest.raises(UserError, match="not objects with named fields"):
        open_rows(write(tmp_path / "a.jsonl", [1, 2]))
