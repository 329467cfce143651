"""Templates whose turns end with the marker of the next speaker, as those of GLM."""

from pathlib import Path

import pytest

from luyen.base.records import Source
from luyen.data.render import Renderer
from luyen.data.retokenization_check import compare
from luyen.data.tokenizer import load_tokenizer
from luyen.rollout.build import tool_parsers
from tests.character_tokenizer import build_character_tokenizer
from tests.unit.data.families import HOME, TOOLS, Played
from tests.unit.data.templates import user

SPECIAL = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
CALL = "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Renderer:
    folder: Path = tmp_path_factory.mktemp("glm")
    build_character_tokenizer(
        folder,
        chat_template=(HOME / "glm_like.jinja").read_text(),
        special_tokens=SPECIAL,
        turn_end="<|endoftext|>",
    )
    stops = tool_parsers.facts("glm")["stop_tokens"]
    return Renderer(load_tokenizer(str(folder), more_stops=stops))


def test_the_marker_that_ended_a_turn_is_not_written_again(renderer: Renderer):
    played = Played(renderer, [user("go")], TOOLS)
    played.say(CALL, "", [("add", {"a": "1"})], end="<|observation|>")
    played.results("2")
    played.say("two", "two", end="<|user|>")
    played.hear(user("more"))
    text = renderer.tokenizer.decode(played.tokens, skip_special=False)
    assert text.count("<|observation|>") == 1
    assert text.endswith("<|assistant|>\ntwo<|user|>\nmore<|assistant|>\n")
    assert compare(renderer, **played.streams).same_tokens
    sampled = [t for t, s in zip(played.tokens, played.sources, strict=True) if s == Source.SAMPLED]
    written = renderer.tokenizer.decode(sampled, skip_special=False)
    assert written == f"{CALL}<|observation|>two<|user|>"


@pytest.mark.parametrize("end", [None, "<|endoftext|>", "<|user|>"])
def test_a_turn_that_ended_otherwise_gets_the_marker(renderer: Renderer, end: str | None):
    played = Played(renderer, [user("go")], TOOLS)
    played.say(CALL, "", [("add", {"a": "1"})], end=end)
    played.results("2")
    text = renderer.tokenizer.decode(played.tokens, skip_special=False)
    assert f"{CALL}{end or ''}<|observation|>\n<tool_response>\n2" in text
    assert compare(renderer, **played.streams).drift is None


def test_a_given_conversation_does_not_teach_where_such_a_turn_ends(renderer: Renderer):
    messages = [user("go"), {"role": "assistant", "content": "two"}, user("more")]
    messages.append({"role": "assistant", "content": "three"})
    [branch] = renderer.conversation(messages)
    pairs = zip(branch.tokens, branch.sources, strict=True)
    sampled = [token for token, source in pairs if source == Source.SAMPLED]
    assert renderer.tokenizer.decode(sampled, skip_special=False) == "twothree"
