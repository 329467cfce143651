"""Renderer laws, for conversations that hypothesis makes up, under several templates."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from luyen.base.records import Source
from luyen.data.render import Extension, Rendered, Renderer
from luyen.data.renderer_laws import (
    LAWS,
    PROBES,
    broken_laws,
    mask_alignment,
    prefix_extension,
    round_trip,
)
from tests.character_tokenizer import CHARACTERS
from tests.unit.data.templates import assistant, renderer, user

TEXT = st.text(alphabet=CHARACTERS, min_size=1, max_size=12)
TURNS = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4)
GROWING = ("chatml", "headers", "always prompts")
"""Templates that only ever add to a conversation."""


def conversation(turns: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [message for ask, say in turns for message in (user(ask), assistant(say))]


@pytest.mark.parametrize("name", GROWING)
@settings(max_examples=60, deadline=None)
@given(turns=TURNS)
def test_every_law_holds_under_a_template_that_only_grows(name: str, turns: list[tuple[str, str]]):
    assert broken_laws(renderer(name), conversation(turns)) == []


@settings(max_examples=60, deadline=None)
@given(turns=TURNS, results=st.lists(TEXT, min_size=1, max_size=3), argument=TEXT)
def test_every_law_holds_for_tool_calls(
    turns: list[tuple[str, str]], results: list[str], argument: str
):
    call = {"type": "function", "function": {"name": "look", "arguments": {"x": argument}}}
    trace = [
        *conversation(turns),
        user("go"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        *({"role": "tool", "content": text} for text in results),
        assistant("done"),
    ]
    tools = [{"type": "function", "function": {"name": "look"}}]
    assert broken_laws(renderer("chatml"), trace, tools) == []


@settings(max_examples=60, deadline=None)
@given(turns=TURNS, thought=TEXT)
def test_a_template_that_forgets_breaks_the_prefix_law_alone_and_every_answer_still_counts_once(
    turns: list[tuple[str, str]], thought: str
):
    messages = conversation([(ask, f"<think>{thought}</think>{say}") for ask, say in turns])
    found = broken_laws(renderer("forgets"), messages)
    assert {v.law for v in found} == ({"prefix extension"} if len(turns) > 1 else set())
    branches = renderer("forgets").conversation(messages)
    assert len(branches) == len(turns)
    for turn, branch in enumerate(branches):
        context = list(branch.tokens[: branch.sources.index(Source.SAMPLED)])
        assert context == renderer("forgets").prompt_tokens(messages[: 2 * turn + 1])


@settings(max_examples=60, deadline=None)
@given(turns=TURNS, cut=st.integers(0, 3))
def test_growing_never_changes_a_token_that_is_there(turns: list[tuple[str, str]], cut: int):
    messages = conversation(turns)
    shorter = messages[: 2 * max(1, len(turns) - cut)]
    (whole,) = renderer("headers").conversation(messages)
    (part,) = renderer("headers").conversation(shorter)
    count = len(part.tokens)
    assert whole.tokens[:count] == part.tokens
    assert whole.sources[:count] == part.sources
    assert whole.turns[:count] == part.turns


@pytest.mark.parametrize("probe", PROBES)
def test_the_built_in_tokenizer_passes_the_self_test(probe: str):
    assert broken_laws(renderer("chatml"), PROBES[probe]) == []


MESSAGES = [user("one+two"), assistant("three"), user("more"), assistant("four")]


def planted(monkeypatch: pytest.MonkeyPatch, change: Any) -> Renderer:
    """A renderer whose conversations come out changed."""
    honest = Renderer.conversation

    def conversation(self: Renderer, *args: Any) -> tuple[Rendered, ...]:
        return tuple(change(branch) for branch in honest(self, *args))

    monkeypatch.setattr(Renderer, "conversation", conversation)
    return renderer("chatml")


def replaced(branch: Rendered, **streams: Any) -> Rendered:
    fields = {name: getattr(branch, name) for name in ("tokens", "sources", "turns", "breaks")}
    return Rendered(**{**fields, **streams})


def test_a_lost_token_breaks_the_round_trip(monkeypatch: pytest.MonkeyPatch):
    def lose(branch: Rendered) -> Rendered:
        kept = slice(1, None)
        return replaced(
            branch,
            tokens=branch.tokens[kept],
            sources=branch.sources[kept],
            turns=branch.turns[kept],
        )

    (found,) = round_trip(planted(monkeypatch, lose), MESSAGES)
    assert str(found) == "round trip: '<|im_start' reads back as 'user\\none+t'"


def test_a_shifted_mask_breaks_the_alignment(monkeypatch: pytest.MonkeyPatch):
    def shift(branch: Rendered) -> Rendered:
        return replaced(branch, sources=(Source.PROMPT, *branch.sources[:-1]))

    found = mask_alignment(planted(monkeypatch, shift), MESSAGES)
    assert [v.detail for v in found] == [
        "turn 0 says 'three' and counts 'hree<|im_end|>'",
        "turn 1 says 'four' and counts '\\nour<|im_end|>\\n'",
    ]


def test_a_mask_that_counts_the_template_too_breaks_the_alignment(monkeypatch: pytest.MonkeyPatch):
    def widen(branch: Rendered) -> Rendered:
        first = branch.sources.index(Source.SAMPLED)
        wide = [*branch.sources]
        wide[first - 1] = Source.SAMPLED
        return replaced(branch, sources=tuple(wide))

    (found,) = mask_alignment(planted(monkeypatch, widen), MESSAGES)
    assert found.detail == "turn 0 is 'three<|im_end|>' and counts '\\nthree<|im_end|>'"


def test_an_answer_that_counts_nowhere_or_twice_breaks_the_alignment(
    monkeypatch: pytest.MonkeyPatch,
):
    honest = Renderer.conversation
    shown = renderer("chatml")
    monkeypatch.setattr(Renderer, "conversation", lambda self, *args: honest(self, *args) * 2)
    assert "turn 0 is counted in 2 branches" in [v.detail for v in mask_alignment(shown, MESSAGES)]
    blank = planted(monkeypatch, lambda b: replaced(b, sources=(Source.PROMPT,) * len(b.tokens)))
    assert "turn 1 is counted in 0 branches" in [v.detail for v in mask_alignment(blank, MESSAGES)]


def test_a_bridge_that_differs_breaks_the_extension(monkeypatch: pytest.MonkeyPatch):
    shown = renderer("chatml")
    honest = Renderer.extend

    def extend(self: Renderer, *args: Any) -> Extension:
        found = honest(self, *args)
        return Extension(tokens=found.tokens[1:], sources=found.sources[1:], restart=None)

    monkeypatch.setattr(Renderer, "extend", extend)
    (found,) = prefix_extension(shown, MESSAGES)
    assert str(found) == "prefix extension: turn 1 has other tokens when it grows"


def test_there_are_three_laws():
    assert (round_trip, prefix_extension, mask_alignment) == LAWS
