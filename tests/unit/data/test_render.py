"""Rendering: every token knows where it came from, and what is there is never tokenised again."""

from typing import Any

import pytest

from luyen.base.records import Source
from luyen.data.render import CALL_LEFT_OUT, DROPPED, PROMPT_NOT_KEPT, REWRITES, Rendered, Renderer
from luyen.data.tokenizer import load_tokenizer
from tests.character_tokenizer import build_character_tokenizer
from tests.unit.data.templates import assistant, pieces, renderer, user

TOOLS = [{"type": "function", "function": {"name": "add"}}]
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}
RESULT = {"role": "tool", "content": "three"}


def test_a_prompt_ends_where_the_assistant_begins():
    shown = renderer("chatml")
    text = "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"
    tokens = shown.prompt_tokens([user("1+2=")])
    assert shown.tokenizer.decode(tokens, skip_special=False) == text
    assert shown.text_of(shown.tokenizer.encode("3<|im_end|>")) == "3"


def test_one_answer_counts_its_words_and_its_end_and_nothing_else():
    shown = renderer("chatml")
    (found,) = shown.conversation([user("1+2="), assistant("3")])
    assert pieces(found, shown) == [
        ("PROMPT", 0, "<|im_start|>user\n1+2=<|im_end|>\n<|im_start|>assistant\n"),
        ("SAMPLED", 0, "3<|im_end|>"),
        ("TEMPLATE", 0, "\n"),
    ]
    assert found.breaks == ()


def test_a_tool_calling_trace_tells_results_from_the_template_around_them():
    shown = renderer("chatml")
    (found,) = shown.conversation([user("hi"), CALL, RESULT, assistant("3")], TOOLS)
    assert pieces(found, shown)[1:] == [
        ("SAMPLED", 0, '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call><|im_end|>'),
        ("TEMPLATE", 1, "\n<|im_start|>user\n<tool_response>"),
        ("TOOL", 1, "three"),
        ("TEMPLATE", 1, "</tool_response><|im_end|>\n<|im_start|>assistant\n"),
        ("SAMPLED", 1, "3<|im_end|>"),
        ("TEMPLATE", 1, "\n"),
    ]


def test_what_a_user_says_later_is_prompt_again():
    shown = renderer("headers")
    (found,) = shown.conversation([user("a"), assistant("b"), user("c"), assistant("d")])
    assert pieces(found, shown)[2:] == [
        ("TEMPLATE", 1, "<|start_header_id|>user<|end_header_id|>\n\n"),
        ("PROMPT", 1, "c"),
        ("TEMPLATE", 1, "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"),
        ("SAMPLED", 1, "d<|eot_id|>"),
    ]


def test_a_result_that_the_template_transforms_is_still_a_tools():
    shown = renderer("headers")
    message = {"role": "tool", "content": "in  \n"}
    assert Source.TOOL in shown.extend([1], [user("x"), assistant("y")], [message]).sources


@pytest.mark.parametrize(
    ("change", "texts"),
    [("| upper", ["THREE"]), ("| tojson", ["three"]), ("[:2]", ["tool: th!assistant: "])],
)
def test_a_result_is_told_from_the_template_unless_its_borders_are_lost(
    tmp_path, change: str, texts: list[str]
):
    line = "{%- for m in messages -%}{{- m.role + ': ' + m.content CHANGE + '!' -}}{%- endfor -%}"
    end = "{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}"
    build_character_tokenizer(tmp_path, chat_template=line.replace("CHANGE", change) + end)
    shown = Renderer(load_tokenizer(str(tmp_path)))
    found = shown.extend([1], [user("x"), assistant("Y")], [RESULT])
    told = Rendered(tokens=found.tokens, sources=found.sources, turns=(0,) * len(found.tokens))
    assert [text for source, _, text in pieces(told, shown) if source == "TOOL"] == texts


@pytest.mark.parametrize("content", ["u", "user", "im", "<", "assistant", "\n", "in"])
def test_a_result_that_reads_like_the_template_is_found_where_it_stands(content: str):
    shown = renderer("chatml")
    found = shown.extend([3], [user("x"), assistant("y")], [{**RESULT, "content": content}])
    told = Rendered(tokens=found.tokens, sources=found.sources, turns=(0,) * len(found.tokens))
    head = "\n<|im_start|>user\n<tool_response>"
    shown_pieces = [(s, text) for s, _, text in pieces(told, shown)]
    if content.strip():
        assert shown_pieces[:2] == [("TEMPLATE", head), ("TOOL", content)]
    else:
        assert {s for s, _ in shown_pieces} == {"TEMPLATE"}


def test_a_template_that_rewrites_history_gives_each_answer_a_branch_of_its_own():
    shown = renderer("forgets")
    messages = [user("a"), assistant("<think>t</think>b"), user("c"), assistant("d")]
    first, second = shown.conversation(messages)
    assert pieces(first, shown) == [
        ("PROMPT", 0, "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"),
        ("SAMPLED", 0, "<think>t</think>b<|im_end|>"),
    ]
    assert pieces(second, shown)[0][2].endswith(
        "assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    )
    assert pieces(second, shown)[1:] == [("SAMPLED", 1, "d<|im_end|>"), ("TEMPLATE", 1, "\n")]
    assert (first.breaks, second.breaks) == ((), (f"turn 1: {REWRITES}",))


def test_a_generation_prompt_that_the_template_does_not_keep_is_named():
    shown = renderer("opens thinking")
    (found,) = shown.conversation([user("a"), assistant("b")])
    assert found.breaks == (f"turn 0: {PROMPT_NOT_KEPT}",)
    assert pieces(found, shown)[:2] == [
        ("PROMPT", 0, "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"),
        ("SAMPLED", 0, "b<|im_end|>"),
    ]
    (kept,) = shown.conversation([user("a"), assistant("<think>b")])
    assert kept.breaks == ()
    assert pieces(kept, shown)[1] == ("SAMPLED", 0, "b<|im_end|>")


def test_a_call_that_the_template_leaves_out_is_named():
    (found,) = renderer("headers").conversation([user("a"), CALL, RESULT, assistant("b")])
    assert found.breaks == (f"turn 0: {CALL_LEFT_OUT}",)


def test_messages_after_the_last_answer_are_context_or_named_as_dropped():
    shown = renderer("chatml")
    (found,) = shown.conversation([user("a"), assistant("b"), user("c")])
    assert pieces(found, shown)[-2:] == [("PROMPT", 0, "c"), ("TEMPLATE", 0, "<|im_end|>\n")]
    thoughtful = [user("a"), assistant("<think></think>b"), user("c")]
    (cut,) = renderer("forgets").conversation(thoughtful)
    assert cut.breaks == (DROPPED,)
    (alone,) = shown.conversation([user("a")])
    assert pieces(alone, shown) == [("PROMPT", 0, "<|im_start|>user\na<|im_end|>\n")]


def extended(name: str, sampled: str, new: list[dict[str, str]]) -> tuple[str, str | None]:
    shown = renderer(name)
    messages = [user("a"), assistant("b")]
    tokens = [*shown.prompt_tokens(messages[:1]), *shown.tokenizer.encode(sampled)]
    found = shown.extend(tokens, messages, new)
    return shown.tokenizer.decode(found.tokens, skip_special=False), found.restart


def test_extension_appends_the_bridge_and_not_what_is_there():
    bridge = "\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n"
    assert extended("chatml", "b<|im_end|>", [user("c")]) == (bridge, None)
    # Another stop token ended the turn: it stands, and the template goes on after it.
    assert extended("chatml", "b<|endoftext|>", [user("c")]) == (bridge, None)
    # The turn was cut off: the template closes it, and nobody sampled that.
    assert extended("chatml", "b", [user("c")]) == (f"<|im_end|>{bridge}", None)


def test_extension_does_not_care_what_the_sampled_text_was():
    shown = renderer("chatml")
    prompt = shown.prompt_tokens([user("a")])
    for odd in ("<think>", "b <|im_start|> b", "\n\n", ""):
        said = [*prompt, *shown.tokenizer.encode(odd), shown.tokenizer.turn_end.token]
        found = shown.extend(said, [user("a"), assistant("b")], [user("c")])
        assert shown.tokenizer.decode(found.tokens).strip() == "user\nc\nassistant"


def test_extension_of_a_template_that_always_prompts_does_not_prompt_twice():
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    assert extended("always prompts", "b<|eot_id|>", [user("c")]) == (
        header.format("user") + "c<|eot_id|>" + header.format("assistant"),
        None,
    )


def test_extension_says_when_a_new_branch_must_begin():
    shown = renderer("forgets")
    messages = [user("a"), assistant("<think>t</think>b")]
    found = shown.extend([1, 2, 3], messages, [user("c")])
    assert found.restart == REWRITES
    assert list(found.tokens) == shown.prompt_tokens([*messages, user("c")])
    assert set(found.sources) == {Source.PROMPT}


def test_a_prompt_that_is_not_kept_and_a_call_that_is_left_out_begin_a_branch():
    messages = [user("a"), assistant("b")]
    assert renderer("opens thinking").extend([3], messages, [user("c")]).restart == REWRITES
    assert renderer("headers").extend([3], [user("a"), CALL], [RESULT]).restart == CALL_LEFT_OUT
    # As it was written, the call is content, and every template keeps that.
    kept = {**CALL, "written": "<tool_call>add</tool_call>"}
    assert renderer("headers").extend([3], [user("a"), kept], [RESULT]).restart is None


def test_words_that_the_template_leaves_out_begin_a_branch(tmp_path):
    says = "{{- m.content.split('</think>')[-1] + '<|im_end|>' -}}"
    body = "{%- for m in messages -%}{{- '<|im_start|>' -}}" + says + "{%- endfor -%}"
    tail = "{%- if add_generation_prompt -%}{{- '<|im_start|>' -}}{%- endif -%}"
    build_character_tokenizer(tmp_path, chat_template=body + tail)
    shown = Renderer(load_tokenizer(str(tmp_path)))
    messages = [user("a"), assistant("<think>hm</think>b")]
    assert shown.extend([3], messages, [user("c")]).restart == REWRITES
    assert shown.extend([3], [user("a"), assistant("b")], [user("c")]).restart is None


def test_template_arguments_reach_the_template(tmp_path):
    build_character_tokenizer(
        tmp_path, chat_template="{{- 'on' if thinking else 'off' -}}{{- messages[0].content -}}"
    )
    found = load_tokenizer(str(tmp_path))
    assert Renderer(found, template_kwargs={"thinking": True}).text([user("!")]) == "on!"
    assert Renderer(found).text([user("!")]) == "off!"


@pytest.mark.parametrize("name", ["chatml", "headers"])
def test_a_slow_tokenizer_that_knows_no_spans_still_renders_the_same_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch
):
    shown = renderer(name)
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    (exact,) = shown.conversation(messages)
    plain = type(shown.tokenizer).encode
    monkeypatch.setattr(
        type(shown.tokenizer), "encode_spans", lambda self, text: (plain(self, text), None)
    )
    (coarse,) = shown.conversation(messages)
    assert coarse.tokens == exact.tokens
    assert coarse.sampled == exact.sampled
