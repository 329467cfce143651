"""Conversations with tools grow into what the template writes for the whole, or begin a branch."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luyen.base.records import Source
from luyen.data.retokenization_check import compare
from luyen.data.template_text import PlainText
from tests.character_tokenizer import CHARACTERS, TAGS
from tests.unit.data.families import (
    FAMILIES,
    STABLE,
    TOOLS,
    Played,
    family_renderer,
)
from tests.unit.data.templates import user

WORDS = st.text(alphabet=CHARACTERS + "éß漢🙂\u0301", max_size=12)
TRIMMED = WORDS.map(str.strip)
CALLS = st.lists(st.tuples(st.just("add"), st.dictionaries(st.just("a"), WORDS)), max_size=2)
STEPS = st.lists(
    st.tuples(TRIMMED, CALLS, st.lists(WORDS, min_size=2, max_size=2), st.booleans()),
    min_size=1,
    max_size=4,
)
"""What is said, what is called, what is answered, whether the turn is cut off."""


def play(name: str, steps: list[Any], tools: list[Any], thoughts: list[str]) -> Played:
    """A conversation as a rollout plays it, compared with a rendering after every answer."""
    family, played = FAMILIES[name], Played(family_renderer(name), [user("go")], tools)
    for k, (content, calls, answers, is_cut) in enumerate(steps):
        calls = calls[: family.most_calls] if tools else []
        content = content if family.has_words_beside_calls or not calls else ""
        thought = thoughts[k] if k < len(thoughts) else ""
        if thought:
            content = f"<think>\n{thought}\n</think>\n\n{content}"
        written = family.write(content, calls, played.turn)
        end = None if is_cut and not calls else family.turn_end
        played.say(written, content, calls, end=end)
        check(played)
        if calls:
            played.results(*answers[: len(calls)])
        else:
            played.hear(user(answers[0]))
        check(played)
    played.say("done", "done", end=family.turn_end)
    check(played)
    return played


def check(played: Played) -> None:
    found = compare(played.renderer, **played.streams)
    assert found.drift is None, found.drift


@pytest.mark.parametrize("name", STABLE)
@settings(max_examples=60, deadline=None)
@given(steps=STEPS, has_tools=st.booleans())
def test_tokens_that_grew_are_those_of_a_rendering(name: str, steps: list[Any], has_tools: bool):
    if name == "mistral" and has_tools:  # tools move to the last user message: see below
        steps = [step for step in steps if step[1]]
    played = play(name, steps, TOOLS if has_tools else [], [])
    found = compare(played.renderer, **played.streams)
    assert played.restarts == []
    assert (found.same_tokens, found.same_text, found.sampled_differs) == (True, True, 0)


@settings(max_examples=100, deadline=None)
@given(steps=STEPS, thoughts=st.lists(st.sampled_from(["", "hm", "a\nb"]), max_size=4))
def test_a_template_that_forgets_thoughts_begins_a_branch_and_never_drifts(
    steps: list[Any], thoughts: list[str]
):
    played = play("qwen3", steps, TOOLS, thoughts)
    expected, is_thoughtful = 0, False
    for k, (_, calls, _, _) in enumerate(steps):
        is_thoughtful |= k < len(thoughts) and bool(thoughts[k])
        if not calls and is_thoughtful:
            expected, is_thoughtful = expected + 1, False
    assert len(played.restarts) == expected


@settings(max_examples=40, deadline=None)
@given(steps=STEPS)
def test_tools_that_move_to_the_last_user_message_begin_a_branch(steps: list[Any]):
    played = play("mistral", steps, TOOLS, [])
    plain = [answers[0] for _, calls, answers, _ in steps if not calls]
    asked = ["go", *plain]
    # A message that says the same as the last one has tools before it as well.
    moves = sum(a != b for a, b in pairwise(asked))
    assert len(played.restarts) == moves


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), role=st.sampled_from(["tool", "user"]))
def test_no_marker_in_what_others_say_becomes_a_token(name: str, data: Any, role: str):
    shown = family_renderer(name)
    markers = sorted(shown.tokenizer.markers)
    piece = st.one_of(st.sampled_from(markers), st.sampled_from(["<", "|", "tool", " x", ">", "["]))
    hostile = data.draw(st.lists(piece, min_size=1, max_size=6).map("".join))
    family, played = FAMILIES[name], Played(shown, [user("go")], TOOLS if role == "tool" else [])
    if role == "tool":
        content, calls = "", [("add", {"a": 1})]
        played.say(family.write(content, calls, 0), content, calls, end=family.turn_end)
        found = played.results(hostile)
    else:
        played.say("yes", "yes", end=family.turn_end)
        found = played.hear(user(hostile))
    ids = set(shown.tokenizer.markers.values())
    source = Source.TOOL if role == "tool" else Source.PROMPT
    inside = [t for t, s in zip(found.tokens, found.sources, strict=True) if s == source]
    read = shown.tokenizer.decode(found.tokens, skip_special=False)
    if found.restart is None:
        assert not ids & set(inside)
        assert shown.tokenizer.decode(inside, skip_special=False).strip() == hostile.strip()
        assert shown.text(played.messages, played.tools, is_prompt=True).endswith(read)
        assert found.notes == ()
    check(played)


@pytest.mark.parametrize("name", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_marker_in_a_row_becomes_a_token_and_its_text_is_kept(name: str, data: Any):
    shown = family_renderer(name)
    ids = set(shown.tokenizer.markers.values())
    pieces = st.one_of(st.sampled_from(sorted(shown.tokenizer.markers)), TRIMMED)
    hostile = data.draw(st.lists(pieces, max_size=6).map("".join))
    tokens, harmless = shown.prompt_tokens([user(hostile)]), shown.prompt_tokens([user("x")])
    unknown = shown.tokenizer.unknown_id
    assert [t for t in tokens if t in ids - {unknown}] == [t for t in harmless if t in ids]
    whole = shown.tokenizer.encode(shown.text([user(hostile)], is_prompt=True))
    decode = shown.tokenizer.decode
    assert decode(tokens, skip_special=False) == decode(whole, skip_special=False)


@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.one_of(st.sampled_from(TAGS), WORDS), max_size=6))
def test_cuts_leave_no_marker_whole_and_text_without_markers_alone(pieces: list[str]):
    plain = PlainText(family_renderer("qwen2_5").tokenizer)
    text = "".join(pieces)
    marks, (message,) = plain.protect([{"role": "tool", "content": text}])
    assert marks.read(message["content"])[0] == text
    cut = message["content"].split(marks.cut)
    markers = family_renderer("qwen2_5").tokenizer.markers
    assert not any(marker in piece for piece in cut for marker in markers)
    assert (len(cut) > 1) == any(marker in text for marker in markers)
