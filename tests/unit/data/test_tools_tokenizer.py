"""The tokenizer of the built-in model for tools: few tokens, and the same text."""

import json
from pathlib import Path

from luyen.data.render import Renderer
from luyen.data.sources import load_dataset
from luyen.data.tokenizer import load_tokenizer, resolve_path
from luyen.data.tool_tasks import CALCULATOR, LOOKUP
from tests.character_tokenizer import SIGNATURES, TOOL_WORDS, build_character_tokenizer

BUILTIN = "builtin://tools"
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "12*34"}}</tool_call>'


def test_the_shipped_files_are_what_the_function_writes(tmp_path: Path):
    build_character_tokenizer(tmp_path, words=TOOL_WORDS, chat_template=SIGNATURES)
    home = Path(resolve_path(BUILTIN))
    for path in tmp_path.iterdir():
        assert (home / path.name).read_text() == path.read_text()
    config = json.loads((home / "config.json").read_text())
    assert config["vocab_size"] == load_tokenizer(BUILTIN).size == 128


def test_words_are_one_token_each_and_everything_reads_back():
    found = load_tokenizer(BUILTIN)
    for word in TOOL_WORDS:
        assert len(found.encode(word)) == 1
    for text in (CALL, "superuser", '{"name" : "x"}', "calc", "Price of it?", "items", '"}}}'):
        assert found.decode(found.encode(text)) == text


def test_tools_are_written_as_signatures():
    renderer = Renderer(load_tokenizer(BUILTIN))
    user = {"role": "user", "content": "1*2="}
    text = renderer.text([user], [LOOKUP, CALCULATOR], is_prompt=True)
    assert "system\nlookup(item)\ncalculator(expression)\n<|im_end|>" in text
    asked = renderer.text([{"role": "system", "content": "Be brief."}, user], [CALCULATOR])
    assert asked.startswith("<|im_start|>system\nBe brief.\ncalculator(expression)\n<|im_end|>")
    assert asked.count("Be brief.") == 1
    assert "calculator" not in renderer.text([user])
    bare = {"type": "function", "function": {"name": "now"}}
    assert "\nnow()\n" in renderer.text([user], [bare])


def test_conversations_are_short_and_grow():
    renderer = Renderer(load_tokenizer(BUILTIN))
    lengths: dict[str, int] = {}
    for address in ("tools://calculator?size=9&traces=1", "tools://orders?size=9&traces=1"):
        for prompt in load_dataset([address]).prompts:
            (rendered,) = renderer.conversation(prompt.messages, prompt.tools)
            assert rendered.breaks == ()
            longest = max(lengths.get(prompt.data_source, 0), len(rendered.tokens))
            lengths[prompt.data_source] = longest
    assert lengths["tools/calculator"] <= 70
    assert lengths["tools/orders"] <= 170
