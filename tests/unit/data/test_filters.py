"""Filters: what is dropped is counted; only what a user said is ever cut."""

import json
from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.data.filters import (
    Truncation,
    drop_duplicates,
    drop_empty,
    drop_overlong,
    truncate,
)
from luyen.data.sources import Dataset, load_dataset
from tests.unit.data.templates import assistant, renderer, user

SHOWN = renderer("chatml")
EMPTY = len(SHOWN.prompt_tokens([user("")]))


def system(content: str) -> dict[str, str]:
    return {"role": "system", "content": content}


def dataset(tmp_path: Path, *conversations: list[dict[str, Any]], **more: Any) -> Dataset:
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": messages, **more} for messages in conversations]
    path.write_text("\n".join(map(json.dumps, rows)))
    return load_dataset([str(path)])


def contents(found: Dataset) -> list[str]:
    return [str(prompt.messages[-1]["content"]) for prompt in found.prompts]


def test_duplicates_are_dropped_but_not_what_is_judged_otherwise(tmp_path: Path):
    rows = [
        {"prompt": [user("a")], "data_source": "x"},
        {"prompt": [user("a")], "data_source": "x", "extra_info": {"index": 9}},
        {"prompt": [user("a")], "data_source": "y"},
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    found = drop_duplicates(load_dataset([str(path)]))
    assert [p.data_source for p in found.prompts] == ["x", "y"]
    assert found.origins == (f"{path} row 1", f"{path} row 3")
    assert found.counts == {"read": 3, "duplicates": 1}


def test_rows_with_nothing_to_answer_are_dropped(tmp_path: Path):
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f", "arguments": {}}]}
    found = dataset(
        tmp_path,
        [user(" \n")],
        [system("s")],
        [user("a")],
        [user("b"), call],
        [user("a"), user("")],
    )
    kept = drop_empty(found)
    assert [len(p.messages) for p in kept.prompts] == [1, 2]
    assert kept.counts == {"read": 5, "empty": 3}


def test_a_prompt_may_be_as_long_as_the_limit_and_no_longer(tmp_path: Path):
    found = dataset(tmp_path, [user("1234")], [user("12345")])
    kept = drop_overlong(found, SHOWN, max_prompt_length=EMPTY + 4)
    assert contents(kept) == ["1234"]
    assert kept.counts == {"read": 2, "overlong": 1}
    assert drop_overlong(found, SHOWN, max_prompt_length=EMPTY + 5).counts == {"read": 2}


def test_tools_count_towards_the_length_of_a_prompt(tmp_path: Path):
    found = dataset(tmp_path, [user("12")], tools=[{"name": "f"}])
    assert drop_overlong(found, SHOWN, max_prompt_length=EMPTY + 2).counts["overlong"] == 1


@pytest.mark.parametrize(
    ("how", "content"), [("left", "6789"), ("right", "1234"), ("middle", "1289")]
)
def test_a_long_prompt_is_cut_on_the_named_side(how: Truncation, content: str, tmp_path: Path):
    found = dataset(tmp_path, [user("123456789")], [user("12")])
    cut = truncate(found, SHOWN, max_prompt_length=EMPTY + 4, truncation=how)
    assert contents(cut) == [content, "12"]
    assert cut.counts == {"read": 2, "truncated": 1}
    assert cut.prompts[0].uid != found.prompts[0].uid


def test_an_odd_number_of_tokens_keeps_one_more_at_the_front(tmp_path: Path):
    found = dataset(tmp_path, [user("123456789")])
    cut = truncate(found, SHOWN, max_prompt_length=EMPTY + 3, truncation="middle")
    assert contents(cut) == ["129"]


def test_only_the_longest_user_message_is_cut(tmp_path: Path):
    messages = [system("be kind to all"), user("123456"), assistant("abcdefghij"), user("xyz")]
    found = dataset(tmp_path, messages)
    whole = len(SHOWN.prompt_tokens(messages))
    cut = truncate(found, SHOWN, max_prompt_length=whole - 2, truncation="right")
    assert [m["content"] for m in cut.prompts[0].messages] == [
        "be kind to all",
        "1234",
        "abcdefghij",
        "xyz",
    ]
    assert len(SHOWN.prompt_tokens(cut.prompts[0].messages)) == whole - 2


def test_what_may_not_be_cut_is_refused_when_it_is_too_long(tmp_path: Path):
    found = dataset(tmp_path, [system("x" * 50), user("12")])
    with pytest.raises(UserError, match="may not be cut") as caught:
        truncate(found, SHOWN, max_prompt_length=40, truncation="left")
    assert "row 1: prompt" in caught.value.field
    schema = [{"name": "f", "description": "y" * 50}]
    tools = dataset(tmp_path, [user("12")], tools=schema)
    with pytest.raises(UserError, match="may not be cut"):
        truncate(tools, SHOWN, max_prompt_length=60, truncation="right")
    nobody = dataset(tmp_path, [system("x" * 50), assistant("a")])
    with pytest.raises(UserError, match="may not be cut"):
        truncate(nobody, SHOWN, max_prompt_length=40, truncation="right")


def test_by_default_a_long_prompt_stops_the_run_and_names_its_row(tmp_path: Path):
    found = dataset(tmp_path, [user("12")], [user("123456")])
    with pytest.raises(UserError, match="filter_overlong_prompts") as caught:
        truncate(found, SHOWN, max_prompt_length=EMPTY + 2, truncation="error")
    assert caught.value.field.endswith("row 2: prompt")
    assert caught.value.value == f"{EMPTY + 6} tokens"
