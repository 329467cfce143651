"""System prompts and prompt templates, and rows that are a question and an answer."""

from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.records import Prompt
from luyen.config.schema.data import DataConfig
from luyen.data.build import build_data
from luyen.data.formats.convert import convert
from luyen.data.formats.detect import Kind
from luyen.data.formats.read import PromptOptions, open_rows
from luyen.data.offline import build_offline_data
from luyen.data.rows import Columns, Frame, RowAt, read_row
from luyen.data.tokenizer import load_tokenizer
from tests.unit.data.format_cases import write
from tests.unit.data.templates import assistant, user

GSM8K = {"question": "1+1=", "answer": "1+1=<<1+1=2>>2\n#### 2"}
TOKENIZER = load_tokenizer("builtin://arithmetic")
ASKED = Frame(template="{question} #### \\boxed{}")


def rows_of(path: str, frame: Frame) -> list[Any]:
    return [row for _, row in open_rows(path, prompts=PromptOptions(frame=frame))]


def prompt_of(row: dict[str, Any], frame: Frame, **columns: Any) -> Prompt:
    return read_row(row, RowAt(file="a.jsonl", number=1), Columns(frame=frame, **columns))


def test_a_question_and_its_answer_are_a_prompt_and_its_ground_truth():
    found = prompt_of({**GSM8K, "level": 2}, Frame())
    assert found.messages == (user("1+1="),)
    assert found.ground_truth == GSM8K["answer"]
    assert found.extra_info == {"level": 2}


def test_other_columns_come_before_question_and_answer():
    row = {**GSM8K, "prompt": [user("2+2=")], "reward_model": {"ground_truth": "4"}}
    found = prompt_of(row, Frame())
    assert (found.messages, found.ground_truth) == ((user("2+2="),), "4")
    found = prompt_of({**GSM8K, "reward_model": {"ground_truth": "4"}}, Frame())
    assert found.ground_truth == "4"


def test_a_template_is_put_around_the_question_and_keeps_other_braces():
    assert prompt_of(GSM8K, ASKED).messages == (user("1+1= #### \\boxed{}"),)
    twice = Frame(template="{{question}} {level} {prompt}")
    found = prompt_of({**GSM8K, "level": 2}, twice)
    assert found.messages == (user("{question} 2 1+1="),)


def test_a_template_makes_plain_text_a_message_of_the_user():
    found = prompt_of({"prompt": "1+1="}, Frame(template="Say: {prompt}"))
    assert found.messages == (user("Say: 1+1="),)


def test_only_the_last_message_of_the_user_is_changed():
    talk = [user("a"), assistant("b"), user("c")]
    found = prompt_of({"prompt": talk}, Frame(system_prompt="S", template="<{prompt}>"))
    assert found.messages == (
        {"role": "system", "content": "S"},
        user("a"),
        assistant("b"),
        user("<c>"),
    )


def test_a_system_message_of_the_row_stays():
    talk = [{"role": "system", "content": "own"}, user("a")]
    assert prompt_of({"prompt": talk}, Frame(system_prompt="S")).messages == tuple(talk)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{question} {answer}", "is the answer"),
        ("{qestion}", "is no column of the row"),
        ("{nested}", "is no column of the row with text"),
    ],
)
def test_a_template_names_columns_with_text_and_never_the_answer(template: str, why: str):
    with pytest.raises(UserError, match="prompt_template") as caught:
        prompt_of({**GSM8K, "nested": [1]}, Frame(template=template))
    assert why in caught.value.why


def test_the_data_block_frames_training_and_validation_rows(tmp_path: Path):
    rows = write(tmp_path / "rows.jsonl", [GSM8K])
    words: dict[str, Any] = {"system_prompt": "#", "prompt_template": "{question}+"}
    data = DataConfig(train_files=(rows,), val_files=(rows,), **words)
    found = build_data(data, tokenizer=TOKENIZER)
    framed = ({"role": "system", "content": "#"}, user("1+1=+"))
    assert found.validation is not None
    assert [p.messages for p in (*found.train.prompts, *found.validation.prompts)] == [framed] * 2


def test_supervised_training_reads_questions_and_answers_in_the_same_frame(tmp_path: Path):
    rows = write(tmp_path / "rows.jsonl", [{"question": "1+1=", "answer": "2"}])
    words: dict[str, Any] = {"system_prompt": "#", "prompt_template": "{question}+"}
    data = DataConfig(train_files=(rows,), **words)
    found = build_offline_data(data, kinds=(Kind.CONVERSATION,), tokenizer=TOKENIZER)
    [row] = found.train
    assert row.messages == (
        {"role": "system", "content": "#"},
        user("1+1=+"),
        assistant("2"),
    )
    assert row.weights == (0.0, 0.0, 1.0)


def test_pairs_are_framed_and_text_without_a_prompt_is_refused(tmp_path: Path):
    pairs = write(tmp_path / "pairs.jsonl", [{"prompt": "q", "chosen": "a", "rejected": "b"}])
    [row] = rows_of(pairs, Frame(system_prompt="S", template="<{prompt}>"))
    assert row.prompt == ({"role": "system", "content": "S"}, user("<q>"))
    assert row.chosen == (assistant("a"),)
    with pytest.raises(UserError, match="is the answer"):
        rows_of(pairs, Frame(template="{chosen}"))
    text = write(tmp_path / "text.jsonl", [{"text": "abc"}])
    with pytest.raises(UserError, match="plain text without a prompt"):
        rows_of(text, Frame(system_prompt="S"))


def test_questions_and_answers_convert_to_conversations_and_to_prompts(tmp_path: Path):
    source = write(tmp_path / "rows.jsonl", [GSM8K])
    assert convert(source, tmp_path / "a.jsonl").kind is Kind.CONVERSATION
    convert(source, tmp_path / "b.jsonl", to="prompts")
    [row] = rows_of(str(tmp_path / "b.jsonl"), Frame())
    assert (row.messages, row.ground_truth) == ((user("1+1="),), GSM8K["answer"])
