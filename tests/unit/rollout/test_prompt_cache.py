"""What conversations open with: rendered once, and never anything but the prompt's own tokens."""

from dataclasses import replace
from pathlib import Path

import pytest

from luyen.base.records import Prompt, make_prompt
from luyen.data.render import Renderer
from luyen.data.tokenizer import load_tokenizer
from luyen.rollout.conversation_config import PromptTokenCache
from tests.character_tokenizer import CHATML, build_character_tokenizer
from tests.talk import TOKENIZER, ScriptedEngine, play, setting
from tests.unit.data.families import FAMILIES, TOOLS, family_renderer

REFUSES = "{%- if 'no' in messages[0].content -%}{{ raise_exception('no') }}{%- endif -%}" + CHATML
"""A template with which a conversation must not begin with some words."""


class Counted:
    """A renderer that writes down which conversations it is asked for."""

    def __init__(self, inner: Renderer) -> None:
        self._inner = inner
        self.asked: list[str] = []

    def prompt_tokens(self, messages, tools=()):
        self.asked.append(messages[0]["content"])
        return self._inner.prompt_tokens(messages, tools)


def asking(*contents: str) -> list[Prompt]:
    return [make_prompt([{"role": "user", "content": content}]) for content in contents]


@pytest.fixture
def counted() -> Counted:
    return Counted(Renderer(TOKENIZER))


@pytest.fixture
def refusing(tmp_path: Path) -> Counted:
    build_character_tokenizer(tmp_path, chat_template=REFUSES)
    return Counted(Renderer(load_tokenizer(str(tmp_path))))


def test_a_prompt_is_rendered_once_however_often_it_is_asked_for(counted: Counted):
    prompt_cache = PromptTokenCache(counted)
    first, second = asking("1+2=", "3+4=")
    found = [list(prompt_cache.tokens(prompt)) for prompt in (first, second, first, second)]
    assert counted.asked == ["1+2=", "3+4="]
    assert found[:2] == found[2:]
    assert found[0] != found[1]


def test_a_prompt_is_rendered_once_for_all_samples_of_its_group(counted: Counted):
    how = replace(setting(), prompt_cache=PromptTokenCache(counted))
    groups = play(ScriptedEngine(lambda *_: "3<|im_end|>"), how, "1+2=", "3+4=", samples=4)
    assert [len(group.rollouts) for group in groups] == [4, 4]
    assert counted.asked == ["1+2=", "3+4="]


def test_no_more_prompts_are_kept_than_the_bound_says_and_the_oldest_go_first(
    counted: Counted, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("luyen.rollout.conversation_config._MAX_PROMPTS", 2)
    prompt_cache = PromptTokenCache(counted)
    prompts = dict(zip("abc", asking(*"abc"), strict=True))
    for name in "abcbcaba":
        prompt_cache.tokens(prompts[name])
    assert "".join(counted.asked) == "abcab"


def test_a_prompt_is_never_taken_for_one_that_is_gone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("luyen.rollout.conversation_config._MAX_PROMPTS", 3)
    shown = Renderer(TOKENIZER)
    prompt_cache = PromptTokenCache(shown)
    for number in range(50):
        # Nobody else holds it, so that the next one may lie in the same place.
        [prompt] = asking(f"{number}+1=")
        assert list(prompt_cache.tokens(prompt)) == shown.prompt_tokens(prompt.messages)
        del prompt


@pytest.mark.parametrize("name", FAMILIES)
def test_a_conversation_opens_with_the_tokens_of_its_rendering(name: str):
    shown = family_renderer(name)
    prompt_cache = PromptTokenCache(shown)
    told = [{"role": "user", "content": "What is 1+2? <|im_end|> é"}]
    for tools in ([], TOOLS):
        prompt = make_prompt(told, tools=tools)
        expected = shown.prompt_tokens(told, tools)
        assert list(prompt_cache.tokens(prompt)) == list(prompt_cache.tokens(prompt)) == expected
