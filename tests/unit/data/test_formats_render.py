"""Rows as tokens: the prompt stands once before both answers, and only answers count."""

from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.records import Source
from luyen.data.formats.records import (
    AnyRow,
    ConversationRow,
    LabelledRow,
    PreferenceRow,
    SteppedRow,
    TextRow,
)
from luyen.data.formats.render import (
    WHOLE,
    Continuation,
    in_tokens,
    render_answer,
    render_conversation,
    render_pair,
    render_steps,
)
from luyen.data.render import Renderer
from luyen.data.tokenizer import Tokenizer, load_tokenizer
from tests.character_tokenizer import CHATML
from tests.unit.data.format_cases import ANSWER_CHANGES_PROMPT, worn
from tests.unit.data.templates import TEMPLATES, assistant, renderer, user

THOUGHT = "<think>hm</think>"
PROMPTS: dict[str, tuple[dict[str, Any], ...]] = {
    "one turn": (user("1+1="),),
    "with a system message": ({"role": "system", "content": "s"}, user("1+1=")),
    "after an answer": (user("1+1="), assistant("2"), user("2+2=")),
    "after a thought": (user("1+1="), assistant(f"{THOUGHT}2"), user("2+2=")),
}


def pair(prompt: Any, chosen: str = "4", rejected: str = "no, 5") -> PreferenceRow:
    return PreferenceRow(
        prompt=prompt, chosen=(assistant(chosen),), rejected=(assistant(rejected),)
    )


def counted(answer: Continuation, shown: Renderer) -> str:
    ids = [token for token, counts in zip(answer.tokens, answer.mask, strict=True) if counts]
    return shown.tokenizer.decode(ids, skip_special=False)


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_prompt_is_a_common_prefix_of_what_the_template_writes(template: str, prompt: str):
    shown, messages = renderer(template), PROMPTS[prompt]
    row = pair(messages)
    found = render_pair(row, shown)
    for answer, said in ((found.chosen, row.chosen), (found.rejected, row.rejected)):
        whole = shown.conversation([*messages, *said])[-1]
        assert found.prompt + answer.tokens == whole.tokens
        end = shown.tokenizer.turn_end
        assert end is not None
        assert counted(answer, shown) == said[0]["content"] + end.text.removesuffix(end.trailing)
    if template != "opens thinking":
        assert list(found.prompt) == shown.prompt_tokens(messages)
        assert found.notes == ()
    else:
        assert found.notes


def test_a_pair_takes_five_calls_of_its_template(monkeypatch: pytest.MonkeyPatch):
    shown = renderer(next(iter(TEMPLATES)))
    row = pair(PROMPTS["one turn"])
    expected = render_pair(row, shown)  # the end of a turn is looked for once a tokenizer
    asked: list[str] = []
    real = Tokenizer.apply_template

    def noted(self: Tokenizer, messages: Any, **more: Any) -> str:
        asked.append(repr((list(messages), more["add_generation_prompt"])))
        return real(self, messages, **more)

    monkeypatch.setattr(Tokenizer, "apply_template", noted)
    assert render_pair(row, shown) == expected
    # The prompt alone, the prompt before each answer, and the prompt with each answer.
    assert len(asked) == 5
    assert len(set(asked)) == 4


def test_a_template_in_which_the_answer_changes_the_prompt_is_refused():
    with pytest.raises(UserError, match="writes the prompt in another way once an answer follows"):
        render_pair(pair(PROMPTS["one turn"]), worn(ANSWER_CHANGES_PROMPT), allow_whole=True)


def test_answers_that_open_in_different_ways_are_refused_or_rendered_whole_and_said():
    shown, row = renderer("opens thinking"), pair(PROMPTS["one turn"], chosen=f"{THOUGHT}4")
    with pytest.raises(UserError, match="other tokens before the chosen than before the rejected"):
        render_pair(row, shown)
    found = render_pair(row, shown, allow_whole=True)
    assert WHOLE in found.notes
    for answer, said in ((found.chosen, row.chosen), (found.rejected, row.rejected)):
        whole = shown.conversation([*row.prompt, *said])[-1]
        assert found.prompt + answer.tokens == whole.tokens
    assert counted(found.chosen, shown) == "hm</think>4<|im_end|>"
    assert counted(found.rejected, shown) == "no, 5<|im_end|>"


def test_an_answer_of_several_turns_counts_what_the_assistant_says():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    row = LabelledRow(
        prompt=(user("1+1="),),
        completion=(
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            assistant("two"),
        ),
        label=True,
        tools=({"name": "add"},),
    )
    shown = renderer("chatml")
    found = render_answer(row, shown)
    assert counted(found.answer, shown) == (
        '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>two<|im_end|>'
    )
    assert Source.TOOL in found.answer.sources
    assert found.tokens == shown.conversation([*row.prompt, *row.completion], row.tools)[0].tokens


def test_a_template_that_rewrites_the_answer_itself_is_refused():
    said = (assistant(f"{THOUGHT}2"), user("sure?"), assistant(f"{THOUGHT}yes"))
    row = LabelledRow(prompt=(user("1+1="),), completion=said, label=True)
    with pytest.raises(UserError, match="rewrites an earlier turn of the answer"):
        render_answer(row, renderer("forgets"))
    assert render_answer(row, renderer("chatml")).prompt


def test_only_messages_with_a_weight_count_by_their_weight():
    row = ConversationRow(
        messages=(user("a"), assistant("b"), user("c"), assistant("d"), user("e"), assistant("f")),
        weights=(0.0, 0.0, 0.0, 0.5, 0.0, 1.0),
    )
    shown = renderer("chatml")
    [found] = render_conversation(row, shown)
    by_weight: dict[float, list[int]] = {}
    for token, weight in zip(found.rendered.tokens, found.weights, strict=True):
        by_weight.setdefault(weight, []).append(token)
    decode = shown.tokenizer.decode
    assert decode(by_weight[0.5], skip_special=False) == "d<|im_end|>"
    assert decode(by_weight[1.0], skip_special=False) == "f<|im_end|>"
    assert by_weight.keys() == {0.0, 0.5, 1.0}


def test_steps_are_judged_on_their_last_token():
    row = SteppedRow(prompt=(user("2*3+1?"),), steps=("2*3=6", "6+1=8"), labels=(1.0, None))
    shown = renderer("chatml")
    found = render_steps(row, shown)
    decode = shown.tokenizer.decode
    text = decode(found.tokens, skip_special=False)
    assert text == "2*3=6\n6+1=8\n<|im_end|>"
    assert [decode(found.tokens[: end + 1]) for end in found.ends] == ["2*3=6\n", "2*3=6\n6+1=8\n"]
    assert list(found.prompt) == shown.prompt_tokens(row.prompt)
    assert found.labels == (1.0, None)


def test_arguments_of_a_row_reach_the_template():
    shown = worn("{{- greeting | default('') -}}" + CHATML)
    plain = LabelledRow(prompt=(user("a"),), completion=(assistant("b"),), label=True)
    greeted = LabelledRow(
        prompt=plain.prompt,
        completion=plain.completion,
        label=True,
        template_kwargs={"greeting": "hello "},
    )
    extra = shown.tokenizer.encode("hello ")
    assert list(render_answer(greeted, shown).prompt) == [
        *extra,
        *render_answer(plain, shown).prompt,
    ]


@pytest.mark.parametrize(
    ("row", "parts"),
    [
        (TextRow(text="1+1"), [("text", 3, 3)]),
        (
            pair((user("1+1="),), "2", "33"),
            [("prompt", 23, 0), ("chosen", 3, 2), ("rejected", 4, 3)],
        ),
        (
            SteppedRow(prompt=(user("1+1="),), steps=("a", "b"), labels=(0.0, None)),
            [("prompt", 23, 0), ("wrong step", 2, 1), ("step, not judged", 2, 0)],
        ),
        (
            ConversationRow(messages=(user("1+1="), assistant("2")), weights=(0.0, 1.0)),
            [("conversation", 26, 2)],
        ),
    ],
)
def test_a_row_is_laid_out_with_lengths_and_what_is_learned(row: AnyRow, parts: list[Any]):
    shown = Renderer(load_tokenizer("builtin://arithmetic"))
    found = in_tokens(row, shown)
    assert [(part.name, part.length, part.learned) for part in found] == parts
