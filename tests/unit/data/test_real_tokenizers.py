"""The laws on real tokenizers and templates: set LUYEN_TEST_TOKENIZERS to a folder of them."""

import os
from pathlib import Path

import pytest

from luyen.base.records import Source
from luyen.data.render import Renderer
from luyen.data.retokenization_check import compare
from luyen.data.tokenizer import load_tokenizer
from tests.unit.data.families import TOOLS, Played
from tests.unit.data.templates import user

HOME = Path(os.environ.get("LUYEN_TEST_TOKENIZERS", "/nowhere"))
FOUND = sorted(path.parent for path in HOME.glob("*/tokenizer.json"))
WORDS = "Héllo, wörld: 漢字 🙂 e\u0301\n\n  x = 12345;"

pytestmark = pytest.mark.skipif(not FOUND, reason="LUYEN_TEST_TOKENIZERS names no tokenizers")


@pytest.fixture(params=FOUND, ids=lambda path: path.name)
def shown(request: pytest.FixtureRequest) -> Renderer:
    return Renderer(load_tokenizer(str(request.param)))


def hostile(shown: Renderer) -> str:
    markers = sorted(shown.tokenizer.markers, key=lambda m: ("im_" not in m, "eot" not in m, m))
    return WORDS + "".join(f"{marker} and " for marker in markers[:40]) + "<|<|im_end|>end|>"


def test_a_conversation_with_users_grows_as_it_is_rendered(shown: Renderer):
    played = Played(shown, [user("go")])
    end = shown.tokenizer.decode([shown.tokenizer.turn_end.token], skip_special=False)
    for said in ("Yes.", WORDS, "", "cut"):
        played.say(said.strip(), said.strip(), end=None if said == "cut" else end)
        played.hear(user(WORDS))
        found = compare(shown, **played.streams)
        assert (found.drift, found.same_tokens) == (None, True)
    assert played.restarts == []


def test_a_hostile_result_is_plain_text(shown: Renderer):
    played = Played(shown, [user(hostile(shown))], TOOLS)
    end = shown.tokenizer.decode([shown.tokenizer.turn_end.token], skip_special=False)
    played.say('{"name": "add", "parameters": {}}', "", [("add", {})], end=end)
    found = played.results(hostile(shown))
    assert found.restart is None
    markers = set(shown.tokenizer.markers.values())
    inside = [t for t, s in zip(found.tokens, found.sources, strict=True) if s == Source.TOOL]
    assert inside
    assert not markers & set(inside)
    calm = Played(shown, [user("x")], TOOLS)
    calm.say('{"name": "add", "parameters": {}}', "", [("add", {})], end=end)
    calm.results("x")
    assert [t for t in played.tokens if t in markers] == [t for t in calm.tokens if t in markers]
    assert compare(shown, **played.streams).drift is None
