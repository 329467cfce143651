"""Rows as a reward model reads them: what is judged, where, and what is refused."""

import pytest
import torch

from luyen.base.errors import UserError
from luyen.base.records import Message
from luyen.data.formats.records import ConversationRow, LabelledRow, PreferenceRow, SteppedRow
from luyen.data.render import Renderer
from luyen.data.tokenizer import load_tokenizer
from luyen.engine.batch import OfflineBatch
from luyen.engine.reward_model import JUDGED, LABELS, MARGINS, TARGETS
from luyen.train.offline.reward_model import pack_rated, pack_scored_pairs, pack_steps

HERE = torch.device("cpu")
START = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def renderer() -> Renderer:
    return Renderer(load_tokenizer("builtin://arithmetic"))


def say(role: str, text: str) -> tuple[Message, ...]:
    return ({"role": role, "content": text},)


def pair(margin: float | None = None) -> PreferenceRow:
    return PreferenceRow(
        prompt=say("user", "1+1="),
        chosen=say("assistant", "2"),
        rejected=say("assistant", "11"),
        margin=margin,
    )


def read_up_to(offline_batch: OfflineBatch, renderer: Renderer) -> list[str]:
    """What stands up to each judged token, from the start of its sequence."""
    found: list[str] = []
    for i in range(len(offline_batch.batch.lengths)):
        one = offline_batch.batch.take([i])
        for place in one.streams[JUDGED].nonzero()[:, 0].tolist():
            tokens = one.tokens[: place + 1].tolist()
            found.append(renderer.tokenizer.decode(tokens, skip_special=False))
    return found


def test_pairs_are_judged_at_the_end_of_what_the_template_writes(renderer: Renderer):
    offline_batch = pack_scored_pairs([pair(0.5)], [0], renderer, HERE, use_margins=True)
    assert read_up_to(offline_batch, renderer) == [f"{START}{a}<|im_end|>\n" for a in ("2", "11")]
    assert offline_batch.numbers[MARGINS].tolist() == [0.5]
    assert offline_batch.batch.labels() == [0, 0], "the prompt is read once"
    assert pack_scored_pairs([pair(0.5)], [0], renderer, HERE).numbers == {}
    with pytest.raises(UserError, match=r"reward_training\.use_margins"):
        pack_scored_pairs([pair()], [0], renderer, HERE, use_margins=True)


def test_numbers_come_from_the_column_or_from_the_mark(renderer: Renderer):
    asked, said = say("user", "1+1="), say("assistant", "2")
    rows = [
        LabelledRow(prompt=asked, completion=said, label=True),
        LabelledRow(prompt=asked, completion=said, label=False),
        LabelledRow(prompt=asked, completion=said, label=False, extra_info={"score": 0.75}),
        ConversationRow(messages=asked + said, weights=(0.0, 1.0), extra_info={"score": 3}),
    ]
    offline_batch = pack_rated(rows, range(4), renderer, HERE, target_key="score")
    assert offline_batch.numbers[TARGETS].tolist() == [1.0, 0.0, 0.75, 3.0]
    assert read_up_to(offline_batch, renderer) == [f"{START}2<|im_end|>\n"] * 4
    bad = ConversationRow(messages=asked + said, weights=(0.0, 1.0), extra_info={"score": "good"})
    with pytest.raises(UserError, match="gives 'good' there"):
        pack_rated([bad], [0], renderer, HERE, target_key="score")


def test_steps_are_judged_where_they_end_if_somebody_marked_them(renderer: Renderer):
    row = SteppedRow(
        prompt=say("user", "1+1="), steps=("1+1=2", "2", "2+0=2"), labels=(1.0, None, 0.0)
    )
    offline_batch = pack_steps([row, row], [0, 1], renderer, HERE)
    ends = [f"{START}1+1=2\n", f"{START}1+1=2\n2\n2+0=2\n"]
    assert read_up_to(offline_batch, renderer) == ends * 2
    assert offline_batch.numbers[LABELS].tolist() == [1.0, 0.0] * 2
    unmarked = SteppedRow(prompt=row.prompt, steps=("2",), labels=(None,))
    with pytest.raises(UserError, match="no step of these 1 rows has a label"):
        pack_steps([unmarked], [0], renderer, HERE)
