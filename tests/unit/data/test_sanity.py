"""Grown tokens beside a rendering: what the policy wrote is counted, anything else is drift."""

from dataclasses import replace

import pytest

from luyen.base.errors import UserError
from luyen.base.records import Branch
from luyen.data.retokenization_check import (
    RetokenizationResult,
    check_against_render,
    compare,
    violation,
)
from tests.unit.data.families import TOOLS, Played, family_renderer
from tests.unit.data.templates import user

CALLS = [("add", {"a": 1})]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def played(name: str = "qwen2_5", written: str = CALL, end: str = "<|im_end|>") -> Played:
    found = Played(family_renderer(name), [user("go")], TOOLS)
    found.say(written, "", CALLS, end=end)
    found.results("2")
    found.say("It is 2.", "It is 2.", end=end)
    return found


def found_in(shown: Played) -> RetokenizationResult:
    return compare(shown.renderer, **shown.streams)


def changed(shown: Played, old: str, new: str) -> Played:
    """The same conversation with other tokens in a bridge."""
    encode = shown.renderer.tokenizer.encode
    a, b = encode(old), encode(new)
    (at,) = [i for i in range(len(shown.tokens)) if shown.tokens[i : i + len(a)] == a]
    sources, turns = [shown.sources[at]] * len(b), [shown.turns[at]] * len(b)
    shown.tokens[at : at + len(a)] = b
    shown.sources[at : at + len(a)] = sources
    shown.turns[at : at + len(a)] = turns
    return shown


def test_a_conversation_as_the_template_writes_it_is_the_same():
    same = RetokenizationResult(same_tokens=True, same_text=True, drift=None)
    assert found_in(played()) == same


def test_a_call_in_other_spacing_is_the_policys_own_affair():
    odd = CALL.replace("\n", "").replace(": ", ":")
    assert found_in(played(written=odd)).same_tokens
    # This template refuses raw calls, so the call is compared with what it writes itself.
    spaced = '[TOOL_CALLS] [{"name":"add", "arguments":{"a":1}}]'
    found = found_in(played("mistral", spaced, "</s>"))
    assert (found.drift, found.sampled_differs, found.same_text) == (None, 1, False)


def test_what_a_template_trims_is_counted_and_no_drift():
    shown = Played(family_renderer("llama3"), [user("go")])
    shown.say("yes \n", "yes \n", end="<|eot_id|>")
    shown.hear(user("more"))
    shown.say("  no", "  no")
    found = found_in(shown)
    assert (found.drift, found.sampled_differs, found.same_tokens) == (None, 2, False)


@pytest.mark.parametrize(
    ("old", "new", "is_blank"),
    [
        ("<tool_response>\n2", "<tool_response>2", True),
        ("<tool_response>\n2", "<tool_response>\n3", False),
        ("user\ngo", "user\n go", True),
        ("user\ngo", "user\nno", False),
    ],
)
def test_a_difference_around_what_was_sampled_is_drift(old: str, new: str, is_blank: bool):
    found = found_in(changed(played(), old, new))
    assert found.drift is not None
    assert (found.is_blank, found.same_tokens) == (is_blank, False)
    assert violation(found, "strict") == found.drift
    assert (violation(found, "ignore_strippable") is None) == is_blank
    assert violation(found, "off") is None


def test_drift_says_where_it_is():
    found = found_in(changed(played(), "<tool_response>\n2", "<tool_response>\n3"))
    assert found.drift is not None
    assert found.drift.startswith("what follows turn 0 has ")
    assert "response>\\n3" in found.drift
    assert "response>\\n2" in found.drift


def test_a_thought_that_the_template_forgets_is_drift_when_no_branch_was_begun():
    shown = Played(family_renderer("qwen3"), [user("go")])
    text = "<think>\nhm\n</think>\n\nyes"
    shown.say(text, text, end="<|im_end|>")
    encode = shown.renderer.tokenizer.encode
    bridge = encode("\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    shown.tokens += bridge
    shown.sources += [shown.sources[0]] * len(bridge)
    shown.turns += [1] * len(bridge)
    shown.turn = 1
    shown.messages.append(user("more"))
    shown.say("ok", "ok", end="<|im_end|>")
    found = found_in(shown)
    assert found.drift is not None
    assert found.drift.startswith("turn 0 has '<think>")


def test_tokens_that_the_text_would_not_get_are_counted(monkeypatch: pytest.MonkeyPatch):
    shown = played()
    honest = type(shown.renderer.tokenizer).encode
    # A tokenizer with one token for `2.`; the policy drew two.
    pair = honest(shown.renderer.tokenizer, "2.")

    def encode(self, text: str) -> list[int]:
        ids = honest(self, text)
        at = next((i for i in range(len(ids)) if ids[i : i + 2] == pair), None)
        return ids if at is None else [*ids[:at], 127, *ids[at + 2 :]]

    monkeypatch.setattr(type(shown.renderer.tokenizer), "encode", encode)
    assert found_in(shown).retokenised == 1


def test_a_turn_that_was_aborted_before_its_first_token_is_left_out():
    for name in ("qwen2_5", "qwen3"):
        shown = Played(family_renderer(name), [user("go")], TOOLS)
        shown.say(CALL, "", CALLS, end="<|im_end|>")
        shown.results("2")
        assert found_in(shown).same_tokens
        shown.say("", "")
        assert found_in(shown).same_tokens
        alone = Played(family_renderer(name), [user("go")])
        alone.say("", "")
        assert found_in(alone).same_tokens


def test_only_the_last_branch_is_compared():
    shown = Played(family_renderer("qwen3"), [user("go")], TOOLS)
    thought = f"<think>\nhm\n</think>\n\n{CALL}"
    shown.say(thought, "<think>\nhm\n</think>\n\n", CALLS, end="<|im_end|>")
    assert shown.results("2").restart is None
    shown.say("2", "2", end="<|im_end|>")
    assert shown.hear(user("more")).restart is not None
    shown.say("ok", "ok")
    found = found_in(shown)
    assert (found.drift, found.sampled_differs) == (None, 1)  # an empty thought is left out


def test_messages_of_the_row_that_the_assistant_said_are_not_the_policys():
    past = [user("a"), {"role": "assistant", "content": "b"}, user("c")]
    shown = Played(family_renderer("qwen2_5"), past)
    shown.say("d", "d", end="<|im_end|>")
    shown.hear(user("e"))
    shown.say("f", "f")
    assert found_in(shown).same_tokens


def test_a_conversation_that_the_template_refuses_is_drift():
    shown = Played(family_renderer("mistral"), [user("go")])
    shown.say("yes", "yes", end="</s>")
    shown.hear(user("more"))
    shown.messages[0] = {"role": "assistant", "content": "no"}
    found = found_in(shown)
    assert "roles must alternate" in str(found.drift)


def branch_of(shown: Played) -> Branch:
    count = len(shown.tokens)
    return Branch(
        tokens=tuple(shown.tokens),
        sources=tuple(shown.sources),
        turns=tuple(shown.turns),
        logps=(None,) * count,
        versions=(None,) * count,
    )


def test_strict_stops_the_run_and_the_others_count():
    shown = played()
    args = {"branch": branch_of(shown), "messages": shown.messages, "tools": TOOLS}
    none = {"drift": 0.0, "sampled_differs": 0.0, "retokenised": 0.0}
    assert check_against_render(shown.renderer, **args, mode="strict") == none
    shown = changed(shown, "<tool_response>\n2", "<tool_response>2")
    args["branch"] = replace(branch_of(shown))
    with pytest.raises(UserError, match=r"tokenization_sanity_check_mode.*what follows turn 0"):
        check_against_render(shown.renderer, **args, mode="strict")
    blank = check_against_render(shown.renderer, **args, mode="ignore_strippable")
    assert blank["drift"] == 1.0
    assert check_against_render(shown.renderer, **args, mode="off") == {}
