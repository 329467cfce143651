"""`luyen data` as a user calls it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.records import Prompt
from luyen.config.schema.data import DataConfig
from luyen.data.build import build_data
from luyen.data.tokenizer import load_tokenizer
from tests.e2e.tiny import luyen


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


PAIR = {"prompt": [user("1+1=")], "chosen": [assistant("2")], "rejected": [assistant("33")]}


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return write(tmp_path / "pairs.jsonl", PAIR, {**PAIR, "id": 7}, {**PAIR, "rejected": 3})


def test_a_file_is_shown_with_its_format_rows_lengths_repetitions_and_problems(pairs: Path):
    done = luyen("data", "inspect", pairs, "--rows", "1", "--tokenizer", "builtin")
    assert done.exit_code == 1
    for words in (
        "3 rows of the format preference",
        "because `chosen` and `rejected` hold messages; `prompt` holds messages",
        "row 1\n  prompt: 23 tokens\n    <|im_start|>user\n    1+1=<|im_end|>\n",
        "  chosen: 3 tokens, 2 learned\n    [[2<|im_end|>]]\n",
        "  rejected: 4 tokens, 3 learned\n    [[33<|im_end|>]]\n",
        "prompt          23        23        23        23",
        "27  ████████████████████████████████████████ 2",
        "1 row repeats an earlier one (row 2 as row 1)",
        "Problems in 1 row\n  rejected: a conversation is a list of messages\n    row 3\n",
        "rejected = 3",
    ):
        assert words in done.output


def test_without_a_tokenizer_messages_are_shown(pairs: Path):
    done = luyen("data", "inspect", pairs, "--rows", "1")
    assert "  prompt: 4 characters\n    user: 1+1=\n" in done.output
    assert "    assistant: [[2]]\n" in done.output


def test_a_sound_file_exits_with_0_and_long_text_is_shortened(tmp_path: Path):
    path = write(tmp_path / "text.jsonl", {"text": "a" * 5000})
    done = luyen("data", "inspect", path)
    assert done.exit_code == 0
    assert "No problems" in done.output
    assert "4,250 more characters" in done.output
    assert "a" * 600 not in done.output


def test_text_cannot_drive_the_terminal(tmp_path: Path):
    done = luyen("data", "inspect", write(tmp_path / "text.jsonl", {"text": "a\x1b[2Jb\r\n"}))
    assert "[[a\\x1b[2Jb\\r\n" in done.output
    assert "\x1b" not in done.output


def test_equal_problems_stand_together(tmp_path: Path):
    bad = [{"text": number} for number in range(20)]
    done = luyen("data", "inspect", write(tmp_path / "text.jsonl", {"text": "a"}, *bad))
    assert done.output.count("this column holds text") == 1
    assert "rows 2, 3, 4, 5, 6, 7, 8, 9 and 12 more" in done.output


def test_the_report_as_data_says_the_same(pairs: Path):
    done = luyen("data", "inspect", pairs, "--json", "--tokenizer", "builtin")
    page = json.loads(done.output)
    assert done.exit_code == 1
    assert (page["ok"], page["format"], page["kind"], page["rows"]) == (
        False,
        "preference",
        "preference",
        3,
    )
    assert [row["row"] for row in page["first_rows"]] == [1, 2]
    chosen = page["first_rows"][0]["parts"][1]
    assert chosen["stretches"][0] == {
        "text": "2<|im_end|>",
        "who": "sampled",
        "is_learned": True,
    }
    assert page["lengths"]["parts"]["whole"]["most"] == 27
    assert page["repeated_rows"]["rows"] == 1
    assert [(problem["row"], problem["column"]) for problem in page["problems"]] == [
        (3, "rejected")
    ]


def test_every_source_of_training_rows_can_be_looked_at():
    done = luyen("data", "inspect", "arithmetic://sum?size=5", "--rows", "1")
    assert done.exit_code == 0
    assert "5 rows of the format prompts" in done.output


def test_an_unknown_file_says_what_was_looked_for_and_as_helps(tmp_path: Path):
    path = write(tmp_path / "rows.jsonl", {"riddle": "q", "hint": "a"})
    done = luyen("data", "inspect", path)
    assert isinstance(done.exception, UserError)
    assert "looked for preference (chosen + rejected)" in str(done.exception)
    both = write(tmp_path / "both.jsonl", {**PAIR, "completion": "2", "label": True})
    assert isinstance(luyen("data", "inspect", both).exception, UserError)
    assert "format preference" in luyen("data", "inspect", both, "--as", "preference").output


def test_rows_are_converted_and_what_is_lost_is_said(pairs: Path, tmp_path: Path):
    target = tmp_path / "ours.parquet"
    stopped = luyen("data", "convert", pairs, target)
    assert stopped.exit_code == 1
    assert "Nothing was written: fix the rows, or --skip them" in stopped.output
    assert not target.exists()
    done = luyen("data", "convert", pairs, target, "--skip", "--to", "labelled")
    assert done.exit_code == 0
    for words in (
        "4 rows of the form labelled",
        "left out: 1 row with problems",
        "lost: which two answers were compared, 2 times",
    ):
        assert words in done.output
    again = luyen("data", "convert", target, tmp_path / "again.jsonl", "--json")
    page = json.loads(again.output)
    assert (page["ok"], page["read"], page["written"], page["lost"]) == (True, 4, 4, {})
    assert "labels: 2 true, 2 false" in luyen("data", "inspect", target).output


def test_a_file_described_beside_it_is_converted_for_training(tmp_path: Path):
    write(tmp_path / "questions.jsonl", {"question": "1+1=", "answer": "2"})
    columns = {"prompt": "question", "response": "answer"}
    entry = {"file_name": "questions.jsonl", "columns": columns}
    (tmp_path / "dataset_info.json").write_text(json.dumps({"sums": entry}))
    done = luyen("data", "convert", tmp_path / "questions.jsonl", tmp_path / "sft.jsonl")
    assert "nothing was lost" in done.output
    assert json.loads((tmp_path / "sft.jsonl").read_text()) == {
        "messages": [user("1+1="), assistant("2")]
    }


GSM8K = {"query": "1+1=", "gold": "2", "level": 3}
ASKED = ("--system-prompt", "Be brief.", "--prompt-template", "{query} (level {level}) #### N")
NAMED = ("--prompt-key", "query", "--ground-truth-key", "gold")


def test_prompts_are_shown_as_a_run_with_these_keys_trains_on_them(tmp_path: Path):
    rows = write(tmp_path / "rows.jsonl", GSM8K)
    done = luyen("data", "inspect", rows, *ASKED, *NAMED)
    assert done.exit_code == 0, done.output
    assert "1 row of the format prompts" in done.output
    assert "`query` is named as the column of the prompt" in done.output
    assert "system: Be brief.\n    user: 1+1= (level 3) #### N\n" in done.output
    shown = prompts(
        rows,
        prompt_template="{query} (level {level}) #### N",
        system_prompt="Be brief.",
        prompt_key="query",
        ground_truth_key="gold",
    )
    out = tmp_path / "out.jsonl"
    assert luyen("data", "convert", rows, out, *ASKED, *NAMED).exit_code == 0
    (again,) = prompts(out)
    assert [(p.messages, p.ground_truth) for p in shown] == [(again.messages, again.ground_truth)]
    assert again.ground_truth == "2"


def prompts(rows: Path, **keys: str) -> Sequence[Prompt]:
    """The prompts that a run with these keys of `data` trains on."""
    data = DataConfig(train_files=(str(rows),), **keys)
    return build_data(data, tokenizer=load_tokenizer("builtin://arithmetic")).train.prompts


def test_questions_are_framed_in_every_kind(tmp_path: Path):
    rows = write(tmp_path / "rows.jsonl", {"question": "1+1=", "answer": "2"})
    asked = ("--system-prompt", "Be brief.", "--prompt-template", "{question} #### N")
    out = tmp_path / "out.jsonl"
    done = luyen("data", "convert", rows, out, "--to", "prompts", *asked)
    assert done.exit_code == 0, done.output
    row = json.loads(out.read_text())
    assert [m["content"] for m in row["prompt"]] == ["Be brief.", "1+1= #### N"]
    assert row["reward_model"]["ground_truth"] == "2"
    shown = luyen("data", "inspect", rows, *asked)
    assert "user: 1+1= #### N\n    assistant: [[2]]" in shown.output


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--prompt-template", "{query} {gold}", *NAMED), "is the answer"),
        (("--prompt-template", "{nothing}", *NAMED), "is no column of the row"),
        (("--prompt-key", "nothing"), "there is neither `nothing` nor `messages`"),
        (("--prompt-key", "query", "--as", "alpaca"), "the rows are to be read as `alpaca`"),
    ],
)
def test_prompt_options_are_refused_as_training_refuses_them(
    tmp_path: Path, words: tuple[str, ...], why: str
):
    done = luyen("data", "inspect", write(tmp_path / "rows.jsonl", GSM8K), *words)
    assert done.exit_code != 0
    assert why in (done.output + str(done.exception or ""))
