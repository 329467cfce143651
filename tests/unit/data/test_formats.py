"""Formats: which one a file has, with the reason, and what each row becomes."""

from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.records import Prompt
from luyen.data.formats.detect import FORMS, detect
from luyen.data.formats.parse import PARSERS
from luyen.data.formats.read import (
    RowReader,
    open_rows,
    read_conversations,
    read_labelled,
    read_preferences,
    read_stepped,
)
from tests.unit.data.format_cases import CASES, PAIR, write
from tests.unit.data.templates import assistant, user


def read(tmp_path: Path, *rows: Any, **options: Any) -> tuple[str, list[Any]]:
    options = {"string_prompts": "user", **options}
    reading = open_rows(write(tmp_path / "rows.jsonl", list(rows)), **options)
    return reading.format.form.name, [row for _, row in reading]


@pytest.mark.parametrize("case", CASES)
def test_each_format_is_found_and_read(case: str, tmp_path: Path):
    name, raw, row = CASES[case]
    assert read(tmp_path, raw) == (name, [row])


def test_every_format_has_a_parser_and_a_case_here():
    assert PARSERS.keys() == FORMS.keys()
    assert {name for name, _, _ in CASES.values()} == FORMS.keys() - {"prompts"}


def test_prompts_are_read_as_training_reads_them(tmp_path: Path):
    raw = {"prompt": [user("q")], "data_source": "s", "reward_model": {"ground_truth": "2"}}
    name, [row] = read(tmp_path, raw)
    assert name == "prompts"
    assert isinstance(row, Prompt)
    assert (row.messages, row.data_source, row.ground_truth) == ((user("q"),), "s", "2")
    assert read(tmp_path, {"messages": [user("q")]})[0] == "prompts"


def test_a_reason_names_the_columns_and_what_they_hold():
    found = detect(["chosen", "rejected"], [CASES["TRL, implicit prompt"][1]])
    assert found.why == (
        "`chosen` and `rejected` hold messages; the prompt is what both begin with"
    )


@pytest.mark.parametrize(
    ("row", "why", "fix"),
    [
        ({"query": "q", "reply": "a"}, "looked for preference (chosen + rejected)", "rename"),
        ({"prompt": "q", "choosen": "a", "rejected": "b"}, "no format", "`chosen` for `choosen`"),
        (
            {"prompt": "q", "completion": "a", "label": True, "chosen": "a", "rejected": "b"},
            "they fit `preference` (chosen, rejected) and `labelled`",
            "preference or labelled",
        ),
        (
            {"prompt": [user("q")], "messages": [user("q"), assistant("a")]},
            "they fit `prompts` (prompt) and `conversation` (messages)",
            "name the one you mean",
        ),
        ({"messages": [], "conversations": []}, "they fit `conversation`", "sharegpt"),
    ],
)
def test_unknown_and_ambiguous_columns_are_refused(
    row: dict[str, Any], why: str, fix: str, tmp_path: Path
):
    with pytest.raises(UserError) as found:
        read(tmp_path, row)
    assert why in found.value.why
    assert fix in found.value.fix
    assert found.value.field.endswith("rows.jsonl: columns")


def test_a_format_that_is_named_is_taken(tmp_path: Path):
    row = {"prompt": "q", "completion": "a", "label": True, "chosen": "a", "rejected": "b"}
    assert read(tmp_path, row, form="labelled")[0] == "labelled"
    with pytest.raises(UserError, match="did you mean `alpaca`"):
        read(tmp_path, row, form="alpacca")


def test_plain_text_is_refused_unless_it_may_become_messages(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", [CASES["TRL, text"][1]])
    with pytest.raises(UserError, match="skip the chat template"):
        list(read_preferences(path))
    reading = read_preferences(path, string_prompts="user")
    assert [row for _, row in reading] == [PAIR]
    assert reading.counts["plain text made messages"] == 1


@pytest.mark.parametrize(
    ("case", "reader"),
    [
        ("TRL, messages", read_preferences),
        ("unpaired", read_labelled),
        ("stepwise", read_stepped),
        ("alpaca", read_conversations),
    ],
)
def test_a_reader_takes_its_own_kind_and_refuses_others(case: str, reader: Any, tmp_path: Path):
    _, raw, row = CASES[case]
    found: RowReader[Any] = reader(write(tmp_path / "a.jsonl", [raw]), string_prompts="user")
    assert [one for _, one in found] == [row]
    with pytest.raises(UserError, match="its rows are of the format `text`"):
        reader(write(tmp_path / "b.jsonl", [{"text": "abc"}]))
