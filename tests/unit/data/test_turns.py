"""Messages with calls, in a form that every template takes."""

from luyen.data.render import WRITTEN, assistant_message, call_id, forms, tool_message
from tests.unit.data.families import HARMONY, TOOLS, Played, family_renderer
from tests.unit.data.templates import user

CALLS = [("add", {"a": 1}), ("add", {"a": 2})]


def test_ids_are_nine_letters_and_digits_and_belong_together():
    ids = {call_id(turn, index) for turn in (0, 9, 123) for index in (0, 31)}
    assert len(ids) == 6
    assert all(len(name) == 9 and name.isalnum() for name in ids)
    calls = assistant_message("", CALLS, turn=4)["tool_calls"]
    for index, call in enumerate(calls):
        assert call["id"] == tool_message("add", "", turn=4, index=index)["tool_call_id"]


def test_a_message_holds_what_was_written_only_where_it_says_more():
    assert WRITTEN not in assistant_message("hi", [], turn=0, written="hi")
    message = assistant_message("hi", CALLS[:1], turn=0, written="hi [add 1]")
    as_written, in_parts = forms([user("a"), message])
    assert as_written[1] == {"role": "assistant", "content": "hi [add 1]"}
    assert set(in_parts[1]) == {"role", "content", "tool_calls"}
    assert forms([user("a")]) == [[user("a")]]


def test_channels_become_the_fields_that_their_template_demands():
    thought = "<|channel|>analysis<|message|>hm<|end|>"
    final = "<|start|>assistant<|channel|>final<|message|>42"
    plain = assistant_message(thought + final, [], turn=0)
    assert (plain["thinking"], plain["content"]) == ("hm", "42")
    note = "<|start|>assistant<|channel|>commentary<|message|>calling<|end|>"
    beside = assistant_message(thought + note, CALLS[:1], turn=0)
    assert (beside["thinking"], beside["content"]) == ("hm\ncalling", "")
    assert "thinking" not in assistant_message("a < b", [], turn=0)


def test_harmony_keeps_thoughts_while_tools_are_called_and_drops_them_after_an_answer():
    played = Played(family_renderer("gpt_oss"), [user("1+2")], TOOLS)
    thought = "<|channel|>analysis<|message|>hm<|end|>"
    call = '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}'
    played.say(thought + call, thought, CALLS[:1], end="<|call|>")
    found = played.results("3 <|end|>")
    assert found.restart is None
    read = played.renderer.tokenizer.decode(found.tokens, skip_special=False)
    assert read == (
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3 <|end|>"'
        "<|end|><|start|>assistant"
    )
    end = 2 + HARMONY.index("<|end|>")
    assert found.tokens.count(end) == 1
    said = "<|channel|>final<|message|>3"
    played.say(said, said, end="<|return|>")
    again = played.hear(user("and 3+4"))
    assert again.restart is not None
    read = played.renderer.tokenizer.decode(again.tokens, skip_special=False)
    assert "hm" not in read
    assert "<|channel|>final<|message|>3<|end|>" in read


def test_a_template_that_takes_one_call_gets_two_as_they_were_written():
    played = Played(family_renderer("llama3"), [user("go")], TOOLS)
    played.say('{"name": "add"}; {"name": "add"}', "", CALLS, end="<|eot_id|>")
    assert played.results("1", "2").restart is None


def test_a_template_that_refuses_the_written_form_gets_the_parts():
    played = Played(family_renderer("mistral"), [user("go")], TOOLS)
    for turn in range(3):
        # Not letter by letter what the template writes, and no reason for a branch.
        played.say(f'[TOOL_CALLS][{{"name":"add","n":{turn}}}]', "", CALLS[:1], end="</s>")
        assert played.results(str(turn)).restart is None


def test_a_system_message_that_moves_begins_a_branch():
    system = {"role": "system", "content": "be brief"}
    played = Played(family_renderer("mistral"), [system, user("go")], TOOLS)
    assert "be brief" in played.renderer.text_of(played.tokens)
    played.say('[TOOL_CALLS][{"name":"add"}]', "", CALLS[:1], end="</s>")
    # The template writes it before the last message alone, and that is now the tool's.
    assert played.results("3").restart is not None
    assert "be brief" not in played.renderer.text_of(played.tokens)
