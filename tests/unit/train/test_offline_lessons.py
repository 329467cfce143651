"""Rows as lessons: which tokens count, which answers stand together, and what is dropped."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from luyen.base.errors import UserError
from luyen.config.schema.data import DataConfig
from luyen.data.formats.detect import Kind
from luyen.data.formats.records import ConversationRow, LabelledRow, PreferenceRow, TextRow
from luyen.data.offline import OfflineData, build_offline_data
from luyen.data.render import Renderer
from luyen.data.tokenizer import load_tokenizer
from luyen.engine.batch import PackedBatch
from luyen.engine.preference import DESIRABLE, MARGINS, MISMATCHED
from luyen.engine.supervised import TOKEN_WEIGHT
from luyen.train.offline.pairs import pack_labelled, pack_pairs
from luyen.train.offline.sft import pack_conversations

TOKENIZER = load_tokenizer("builtin://arithmetic")
RENDERER = Renderer(TOKENIZER)
CPU = torch.device("cpu")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def learned(batch: PackedBatch) -> str:
    """The tokens that count, as text."""
    return TOKENIZER.decode(batch.tokens[batch.layout.mask].tolist())


def talk(*weights: float) -> ConversationRow:
    messages = (user("1+1="), said("2"), user("2+2="), said("4"), said("5"))
    return ConversationRow(messages=messages, weights=weights or (0.0, 1.0, 0.0, 1.0, 1.0))


class TestConversations:
    def test_what_the_assistant_says_counts(self):
        assert learned(pack_conversations([talk()], RENDERER)) == "245"

    def test_the_last_turn_alone(self):
        assert learned(pack_conversations([talk()], RENDERER, learn="last_turn")) == "5"

    def test_everything_after_the_last_question(self):
        assert learned(pack_conversations([talk()], RENDERER, learn="completion")) == "45"

    def test_a_message_of_weight_zero_is_read_and_not_learned(self):
        row = talk(0.0, 0.0, 0.0, 1.0, 1.0)
        assert learned(pack_conversations([row], RENDERER)) == "45"

    def test_weights_of_messages_are_weights_of_tokens(self):
        batch = pack_conversations([talk(0.0, 0.5, 0.0, 1.0, 1.0)], RENDERER)
        weights = batch.streams[TOKEN_WEIGHT][batch.layout.mask]
        assert sorted(set(weights.tolist())) == [0.5, 1.0]
        assert TOKEN_WEIGHT not in pack_conversations([talk()], RENDERER).streams

    def test_plain_text_and_its_end_count_but_for_its_first_token(self):
        batch = pack_conversations([TextRow(text="1+1=2")], RENDERER)
        assert learned(batch) == "+1=2"
        assert int(batch.tokens[-1]) == TOKENIZER.end_id

    def test_rows_without_anything_to_learn_are_refused(self):
        row = talk(0.0, 0.0, 0.0, 0.0, 0.0)
        with pytest.raises(UserError, match="to learn"):
            pack_conversations([row], RENDERER)


def pair(question: str, margin: float | None = None) -> PreferenceRow:
    return PreferenceRow(
        prompt=(user(question),), chosen=(said("22"),), rejected=(said("3"),), margin=margin
    )


class TestPairs:
    def test_the_chosen_answer_stands_first_and_shares_its_group(self):
        offline_batch = pack_pairs([pair("1+1="), pair("2+2=")], [1, 0], RENDERER, CPU)
        assert offline_batch.rows == (1, 0)
        assert offline_batch.batch.labels() == [0, 0, 1, 1]
        end = len(TOKENIZER.encode(TOKENIZER.turn_end.text)) if TOKENIZER.turn_end else 0
        assert offline_batch.batch.layout.lengths().tolist() == [2 + end, 1 + end] * 2

    def test_margins_are_read_when_asked_for(self):
        rows = [pair("1+1=", 0.5), pair("2+2=", 2.0)]
        offline_batch = pack_pairs(rows, [0, 1], RENDERER, CPU, use_margins=True)
        assert offline_batch.numbers[MARGINS].tolist() == [0.5, 2.0]
        with pytest.raises(UserError, match="margin"):
            pack_pairs([pair("1+1=")], [0], RENDERER, CPU, use_margins=True)

    def test_a_pair_makes_a_good_and_a_bad_answer(self):
        offline_batch = pack_labelled([pair("1+1="), pair("2+2=")], [0], RENDERER, CPU)
        assert offline_batch.numbers[DESIRABLE].tolist() == [True, False]

    def test_mismatched_answers_follow_other_prompts_whatever_the_step(self):
        rows = [
            LabelledRow(prompt=(user(f"{i}+1="),), completion=(said(str(i)),), label=i % 2 == 0)
            for i in range(4)
        ]
        whole = pack_labelled(rows, range(4), RENDERER, CPU, is_mismatched=True)
        part = pack_labelled(rows, [2], RENDERER, CPU, is_mismatched=True)
        aside, alone = whole.aside[MISMATCHED], part.aside[MISMATCHED]
        assert learned(aside) == "1230"
        assert torch.equal(aside.take([2]).tokens, alone.tokens)

    def test_rows_that_all_ask_the_same_have_no_mismatch(self):
        rows = [pair("1+1="), pair("1+1=")]
        with pytest.raises(UserError, match="asks something else"):
            pack_labelled(rows, [0], RENDERER, CPU, is_mismatched=True)

    def test_a_mismatched_answer_keeps_to_the_longest_sequence(self):
        rows = [
            LabelledRow(prompt=(user(asked),), completion=(said(text),), label=True)
            for asked, text in (("1" * 30, "1"), ("2+2=", "2" * 40), ("3+3=", "3"))
        ]
        offline_batch = pack_labelled(rows, [0], RENDERER, CPU, is_mismatched=True, longest=70)
        assert learned(offline_batch.aside[MISMATCHED]) == "3"
        with pytest.raises(UserError, match="fits"):
            pack_labelled(rows, [0], RENDERER, CPU, is_mismatched=True, longest=20)

    def test_numbers_of_marked_answers_and_pairs_go_back_to_their_rows(self):
        single = LabelledRow(prompt=(user("7+7="),), completion=(said("1"),), label=False)
        offline_batch = pack_labelled(
            [pair("1+1="), single, pair("2+2=")], [2, 1, 0], RENDERER, CPU
        )
        assert [x.tolist() for x in offline_batch.by_row(torch.arange(5))] == [[0, 1], [2], [3, 4]]


def offline(path: Path, *rows: dict[str, Any], kind: Kind, **keys: Any) -> OfflineData[Any]:
    path.write_text("\n".join(map(json.dumps, rows)))
    data = DataConfig.model_validate({"train_files": [str(path)], **keys})
    return build_offline_data(data, kinds=(kind,), tokenizer=TOKENIZER)


class TestRows:
    ROW = {"prompt": [user("1+1=")], "chosen": [said("2")], "rejected": [said("3")]}  # noqa: RUF012

    def test_ties_duplicates_and_overlong_rows_are_dropped_and_counted(self, tmp_path: Path):
        tie = {**self.ROW, "rejected": [said("2")]}
        long = {**self.ROW, "chosen": [said("2" * 90)]}
        rows = (self.ROW, self.ROW, tie, long, {**self.ROW, "prompt": [user("1+2=")]})
        keys = {"max_prompt_length": 40, "max_response_length": 40}
        found = offline(tmp_path / "a.jsonl", *rows, kind=Kind.PREFERENCE, **keys)
        assert len(found.train) == len(found.given.train.prompts) == 2
        counts = {"read": 5, "duplicates": 1, "ties": 1, "overlong": 1}
        assert dict(found.given.train.counts) == counts

    def test_rows_of_another_kind_are_refused_by_name(self, tmp_path: Path):
        with pytest.raises(UserError, match="of the kind `preference`"):
            offline(tmp_path / "a.jsonl", self.ROW, kind=Kind.LABELLED)

    def test_every_part_of_a_row_counts_in_its_identity(self, tmp_path: Path):
        other = {**self.ROW, "rejected": [said("4")]}
        found = offline(tmp_path / "a.jsonl", self.ROW, other, kind=Kind.PREFERENCE)
        first, second = found.given.train.prompts
        assert first.messages == second.messages
        assert first.uid != second.uid

    def test_rows_without_anything_to_learn_are_dropped(self, tmp_path: Path):
        found = offline(tmp_path / "a.jsonl", {"text": ""}, {"text": "1+1"}, kind=Kind.TEXT)
        assert [row.text for row in found.train] == ["1+1"]
        assert found.given.train.counts["without anything to learn"] == 1

    def test_two_ratings_of_one_answer_are_two_rows(self, tmp_path: Path):
        rows = [{"prompt": "1+1=", "completion": "2", "score": score} for score in (0.0, 1.0)]
        path = tmp_path / "a.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        data = DataConfig.model_validate({"train_files": [str(path)], "string_prompts": "user"})
        kinds = (Kind.CONVERSATION,)
        counts = [
            len(build_offline_data(data, kinds=kinds, tokenizer=TOKENIZER, columns=columns).train)
            for columns in ((), ("score",))
        ]
        assert counts == [1, 2]

    def test_alpaca_rows_become_conversations(self, tmp_path: Path):
        row = {"instruction": "1+1=", "input": "", "output": "2"}
        found = offline(tmp_path / "a.jsonl", row, kind=Kind.CONVERSATION)
        assert learned(pack_conversations(found.train, RENDERER)) == "2"
