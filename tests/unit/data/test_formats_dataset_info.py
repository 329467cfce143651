"""`dataset_info.json`: a file is read as the entry beside it says."""

import json
from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.data.formats.read import open_rows
from luyen.data.formats.records import ConversationRow, LabelledRow, PreferenceRow
from tests.unit.data.templates import assistant, user

CALL = {"type": "function", "function": {"name": "add", "arguments": {}}}


def read(tmp_path: Path, entries: Any, row: Any) -> tuple[Any, list[Any]]:
    (tmp_path / "dataset_info.json").write_text(json.dumps(entries))
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([row]))
    reading = open_rows(str(path), string_prompts="user")
    return reading.format, [found for _, found in reading]


def entry(**keys: Any) -> dict[str, Any]:
    return {"mine": {"file_name": "rows.json", **keys}, "other": {"file_name": "x.json"}}


def test_columns_of_any_name_are_mapped(tmp_path: Path):
    columns = {"prompt": "question", "response": "answer"}
    format, rows = read(tmp_path, entry(columns=columns), {"question": "q", "answer": "a", "n": 1})
    assert format.form.name == "alpaca"
    assert format.why.endswith("dataset_info.json: mine says alpaca")
    assert rows == [
        ConversationRow(
            messages=(user("q"), assistant("a")), weights=(0.0, 1.0), extra_info={"n": 1}
        )
    ]


def test_ranking_makes_pairs_and_a_kto_tag_makes_labels(tmp_path: Path):
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad"}
    row = {"q": "q", "good": "a", "bad": "b"}
    _, [pair] = read(tmp_path, entry(ranking=True, columns=columns), row)
    assert pair == PreferenceRow(
        prompt=(user("q"),), chosen=(assistant("a"),), rejected=(assistant("b"),)
    )
    row = {"talk": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}], "ok": True}
    columns = {"messages": "talk", "kto_tag": "ok"}
    _, [labelled] = read(tmp_path, entry(formatting="sharegpt", columns=columns), row)
    assert labelled == LabelledRow(prompt=(user("q"),), completion=(assistant("a"),), label=True)


def test_tags_name_fields_and_speakers(tmp_path: Path):
    tags = {
        "role_tag": "who",
        "content_tag": "what",
        "user_tag": "U",
        "assistant_tag": "A",
        "observation_tag": "O",
        "function_tag": "F",
    }
    talk = [("U", "q"), ("F", '{"name": "add"}'), ("O", "1"), ("A", "a")]
    row = {"conversations": [{"who": who, "what": what} for who, what in talk]}
    _, [found] = read(tmp_path, entry(formatting="sharegpt", tags=tags), row)
    assert found.messages == (
        user("q"),
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "1"},
        assistant("a"),
    )


def test_openai_rows_keep_their_roles(tmp_path: Path):
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user"}
    columns = {"messages": "messages"}
    _, [found] = read(
        tmp_path,
        entry(formatting="openai", columns=columns, tags=tags),
        {"messages": [user("q"), assistant("a")]},
    )
    assert found.messages == (user("q"), assistant("a"))


def test_a_problem_names_the_column_of_the_file(tmp_path: Path):
    with pytest.raises(UserError, match=r"rows.json row 1: answer = None: .* no such column"):
        read(tmp_path, entry(columns={"prompt": "q", "response": "answer"}), {"q": "q"})


def test_files_that_no_entry_names_are_judged_by_their_columns(tmp_path: Path):
    format, _ = read(tmp_path, {"x": {"file_name": "x.json"}}, {"text": "abc"})
    assert format.form.name == "text"


def test_what_is_not_applied_is_said(tmp_path: Path):
    row = {"instruction": "q", "output": "a"}
    format, _ = read(tmp_path, entry(num_samples=5), row)
    assert format.notes == ("dataset_info.json: `num_samples` is not applied",)


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"formating": "alpaca"}, "did you mean `formatting`"),
        ({"formatting": "alpca"}, "did you mean `alpaca`"),
        ({"columns": {"promt": "q"}}, "did you mean `prompt`"),
        ({"columns": ["q"]}, "maps names to names"),
        ({"formatting": "sharegpt", "tags": {"rol_tag": "q"}}, "did you mean `role_tag`"),
        ({"ranking": True, "columns": {"kto_tag": "k"}}, "either ranked in pairs or judged"),
    ],
)
def test_a_wrong_entry_is_refused(keys: dict[str, Any], why: str, tmp_path: Path):
    with pytest.raises(UserError, match=why):
        read(tmp_path, entry(**keys), {"instruction": "q", "output": "a"})


def test_entries_that_disagree_and_a_torn_file_are_refused(tmp_path: Path):
    row = {"instruction": "q", "output": "a"}
    two = {"a": {"file_name": "rows.json"}, "b": {"file_name": "rows.json", "ranking": True}}
    with pytest.raises(UserError, match="more than once: a, b"):
        read(tmp_path, two, row)
    same = {"a": {"file_name": "rows.json"}, "b": {"file_name": "rows.json"}}
    assert len(read(tmp_path, same, row)[1]) == 1
    with pytest.raises(UserError, match="it holds one object"):
        read(tmp_path, [], row)
    (tmp_path / "dataset_info.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        open_rows(str(tmp_path / "rows.json"))
