"""Converting: our own forms lose nothing, and what a form cannot hold is said."""

import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luyen.base.errors import UserError
from luyen.base.records import make_prompt
from luyen.data.formats.convert import CHANGES, convert, own_form, write_rows
from luyen.data.formats.detect import FORMS, Kind
from luyen.data.formats.read import open_rows
from luyen.data.formats.records import (
    AnyRow,
    ConversationRow,
    LabelledRow,
    PreferenceRow,
    SteppedRow,
    TextRow,
)
from tests.unit.data.format_cases import CASES, write
from tests.unit.data.templates import assistant, user

texts = st.text(max_size=12).filter(lambda text: "\ufeff" not in text)
names = st.text("abcdef_", min_size=1, max_size=6)
values = st.recursive(
    st.booleans() | st.integers(-9, 9) | texts | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(names, inner, max_size=2),
    max_leaves=4,
)
objects = st.dictionaries(names, values, max_size=3)
calls = st.builds(
    lambda name, arguments: {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"type": "function", "function": {"name": name, "arguments": arguments}},
        ],
    },
    names,
    objects,
)
tools = st.lists(
    st.builds(lambda name, more: {"name": name, "parameters": more}, names, objects), max_size=2
).map(tuple)
prompts = st.lists(
    texts.map(user) | texts.map(lambda text: {"role": "system", "content": text}),
    min_size=1,
    max_size=3,
).map(tuple)
answers = st.tuples(texts.map(assistant) | calls)
shared = {"tools": tools, "template_kwargs": objects, "extra_info": objects}
talks = st.tuples(prompts, answers, st.sampled_from([0.0, 0.5, 1.0])).map(
    lambda parts: ConversationRow(
        messages=(*parts[0], *parts[1]), weights=(*(0.0 for _ in parts[0]), parts[2])
    )
)
ROWS: dict[Kind, st.SearchStrategy[Any]] = {
    Kind.TEXT: st.builds(TextRow, text=texts, extra_info=objects),
    Kind.CONVERSATION: talks,
    Kind.PREFERENCE: st.builds(
        PreferenceRow,
        prompt=prompts,
        chosen=answers,
        rejected=answers,
        margin=st.none() | st.floats(-5, 5),
        **shared,
    ),
    Kind.LABELLED: st.builds(
        LabelledRow, prompt=prompts, completion=answers, label=st.booleans(), **shared
    ),
    Kind.STEPPED: st.lists(
        st.tuples(texts, st.none() | st.floats(0, 1)), min_size=1, max_size=3
    ).flatmap(
        lambda steps: st.builds(
            SteppedRow,
            prompt=prompts,
            steps=st.just(tuple(text for text, _ in steps)),
            labels=st.just(tuple(label for _, label in steps)),
            **shared,
        )
    ),
    Kind.PROMPTS: st.builds(
        lambda messages, tools, source, truth, extra: make_prompt(
            messages, tools=tools, data_source=source, ground_truth=truth, extra_info=extra
        ),
        prompts,
        tools,
        texts,
        st.none() | texts,
        objects,
    ),
}


def read_back(rows: list[AnyRow], ending: str) -> tuple[Kind, list[AnyRow]]:
    with tempfile.TemporaryDirectory() as folder:
        path, lost = Path(folder) / f"rows{ending}", Counter[str]()
        assert write_rows(path, rows, lost) == len(rows)
        assert not lost
        reading = open_rows(str(path))
        return reading.format.kind, [row for _, row in reading]


@pytest.mark.parametrize("ending", [".jsonl", ".parquet"])
@pytest.mark.parametrize("kind", Kind)
def test_what_is_written_is_read_back_whole(kind: Kind, ending: str):
    @settings(max_examples=60, deadline=None)
    @given(st.lists(ROWS[kind], min_size=1, max_size=3))
    def law(rows: list[AnyRow]) -> None:
        assert read_back(rows, ending) == (kind, rows)

    law()


@pytest.mark.parametrize("case", CASES)
def test_a_file_of_any_format_becomes_ours_and_then_stays_as_it_is(case: str, tmp_path: Path):
    name, raw, row = CASES[case]
    source = write(tmp_path / "rows.jsonl", [raw, raw])
    once, twice = tmp_path / "once.jsonl", tmp_path / "twice.jsonl"
    done = convert(source, once)
    assert (done.format.form.name, done.kind) == (name, FORMS[name].kind)
    assert (done.read, done.written, done.left_out, dict(done.lost)) == (2, 2, 0, {})
    assert [found for _, found in open_rows(str(once))] == [row, row]
    assert convert(str(once), twice).texts == 0
    assert twice.read_bytes() == once.read_bytes()


def test_rows_become_another_kind_and_what_is_lost_is_said(tmp_path: Path):
    pair = PreferenceRow(
        prompt=(user("q"),), chosen=(assistant("a"),), rejected=(assistant("b"),), margin=1.0
    )
    source = write(tmp_path / "pairs.jsonl", [own_form(pair)])

    def become(to: str) -> tuple[list[Any], dict[str, int]]:
        done = convert(source, tmp_path / f"{to}.jsonl", to=to)
        return [row for _, row in open_rows(str(tmp_path / f"{to}.jsonl"))], dict(done.lost)

    labelled, lost = become("labelled")
    assert [(row.completion[0]["content"], row.label) for row in labelled] == [
        ("a", True),
        ("b", False),
    ]
    assert lost == {"which two answers were compared": 1, "margin": 1}
    [talk], lost = become("conversation")
    assert (talk.messages, talk.weights) == ((user("q"), assistant("a")), (0.0, 1.0))
    assert lost == {"rejected answer": 1, "margin": 1}
    [prompt], lost = become("prompts")
    assert (prompt.messages, lost) == ((user("q"),), {"answer": 2})


def test_only_wanted_answers_and_right_steps_are_learned_from(tmp_path: Path):
    rows = [{"prompt": "q", "completion": "a", "label": label} for label in (True, False)]
    done = convert(write(tmp_path / "a.jsonl", rows), tmp_path / "b.jsonl", to="conversation")
    assert (done.written, dict(done.lost)) == (1, {"answer with the label false": 1})
    steps = [
        {"prompt": "q", "completions": ["a", "b"], "labels": labels}
        for labels in ([True, None], [True, False], [None, None])
    ]
    done = convert(write(tmp_path / "c.jsonl", steps), tmp_path / "d.jsonl", to="labelled")
    found = [row for _, row in open_rows(str(tmp_path / "d.jsonl"))]
    assert [row.label for row in found if isinstance(row, LabelledRow)] == [True, False]
    assert done.lost == {"label of a step": 3, "answer with unlabelled steps only": 1}


def test_the_answer_of_a_conversation_stays_beside_the_prompt(tmp_path: Path):
    raw = {"messages": [user("q"), assistant("a"), user("r"), assistant("b"), user("bye")]}
    other = {"messages": [assistant("hello")]}
    done = convert(write(tmp_path / "a.jsonl", [raw, other]), tmp_path / "b.jsonl", to="prompts")
    [row] = [row for _, row in open_rows(str(tmp_path / "b.jsonl"))]
    assert row == make_prompt((user("q"), assistant("a"), user("r")), extra_info={"answer": "b"})
    assert done.lost == {
        "message after the last answer": 1,
        "conversation that the assistant begins": 1,
    }


def test_a_change_that_makes_no_sense_is_refused(tmp_path: Path):
    source = write(tmp_path / "a.jsonl", [{"text": "abc"}])
    with pytest.raises(UserError, match="choose among text"):
        convert(source, tmp_path / "b.jsonl", to="preference")
    assert all(before != after for before, after in CHANGES)


def test_problems_stop_it_unless_such_rows_are_left_out(tmp_path: Path):
    source = write(tmp_path / "a.jsonl", [{"text": "abc"}, {"text": 3}, {"text": "def"}])
    target = tmp_path / "b.jsonl"
    done = convert(source, target)
    assert (done.written, done.left_out, target.exists()) == (None, 1, False)
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]
    done = convert(source, target, skip=True)
    assert (done.read, done.written, done.left_out) == (3, 2, 1)
    assert [json.loads(line) for line in target.read_text().splitlines()] == [
        {"text": "abc"},
        {"text": "def"},
    ]


def test_a_torn_file_is_never_converted(tmp_path: Path):
    source = tmp_path / "a.jsonl"
    source.write_text('{"text": "abc"}\n{"text"\n')
    done = convert(str(source), tmp_path / "b.jsonl", skip=True)
    assert (done.written, (tmp_path / "b.jsonl").exists()) == (None, False)
    assert done.torn is not None


def test_nothing_is_overwritten_and_the_ending_is_known(tmp_path: Path):
    source = write(tmp_path / "a.jsonl", [{"text": "abc"}])
    for target, why in (
        (source, "it exists"),
        (tmp_path / "b.txt", "not written to files"),
        (tmp_path / "none" / "b.jsonl", "folder does not exist"),
    ):
        with pytest.raises(UserError, match=why):
            convert(source, Path(target))
