"""The built-in tokenizers: one token per character, some for words, with a real chat template."""

import json
import re
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

VOCAB_SIZE = 128
UNKNOWN, END_OF_TEXT, TURN_START, TURN_END = "<unk>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""Markup that the policy writes and a parser reads: one token each, kept when decoding."""
CHARACTERS = "\n" + "".join(sorted(set(string.printable) - set(string.whitespace) | {" "}))

CHATML = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0].role == 'system' -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
{{- 'Tools:\\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
{{- 'Call: <tool_call>{"name": ..., "arguments": {...}}</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>' + message.content -}}
{{- '</tool_response><|im_end|>\\n' -}}
{%- elif not (tools and loop.first and message.role == 'system') -%}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{%- set call = call.function or call -%}
{{- '<tool_call>{"name": "' + call.name + '", "arguments": ' -}}
{{- call.arguments | tojson + '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

SIGNATURES = """\
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages[0]['role'] == 'system' -%}{{- messages[0]['content'] + '\\n' -}}{%- endif -%}
{%- for tool in tools -%}
{%- set function = tool['function'] or tool -%}
{%- set names = (function['parameters'] or {})['properties'] or {} -%}
{{- function['name'] + '(' + names | join(', ') + ')\\n' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- set role = message['role'] -%}
{%- if role == 'tool' -%}
{{- '<|im_start|>user\\n<tool_response>' + message['content'] -}}
{{- '</tool_response><|im_end|>\\n' -}}
{%- elif not (tools and loop.first and role == 'system') -%}
{{- '<|im_start|>' + role + '\\n' + (message['content'] or '') -}}
{%- if 'tool_calls' in message -%}
{%- for call in message['tool_calls'] or [] -%}
{%- set function = call['function'] or call -%}
{{- '<tool_call>{"name": "' + function['name'] + '", "arguments": ' -}}
{{- function['arguments'] | tojson + '}</tool_call>' -}}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""
"""Tools are written as signatures: a small model reads few tokens. Items are looked up by index,
which costs a sandboxed template a third of what attributes do."""

TOOL_WORDS = (
    "system",
    "user",
    "assistant",
    "calculator",
    "expression",
    "lookup",
    "item",
    "Price of ",
    "Total of ",
    "Plus ",
    "Error: ",
    '{"name": "',
    '", "arguments": {"',
    '": "',
    '"}}',
)
"""What conversations with tools are full of: one token each, as a tokenizer that was learned would
have it."""


def build_character_tokenizer(
    directory: Path,
    *,
    words: Sequence[str] = (),
    chat_template: str = CHATML,
    special_tokens: Sequence[str] = (TURN_START, TURN_END),
    turn_end: str = TURN_END,
) -> None:
    """Write a tokenizer of printable ASCII and newline, filled up to 128 ids.

    Other characters become one `<unk>` each, and each of `words` is one token. The defaults give
    the tokenizer of `builtin://arithmetic`, `TOOL_WORDS` and `SIGNATURES` that of `builtin://tools`;
    another template with its own special tokens gives the same characters other clothes.
    """
    special = [UNKNOWN, END_OF_TEXT, *special_tokens]
    known = [*special, *CHARACTERS, *TAGS, *words]
    known += [f"<reserved_{i}>" for i in range(VOCAB_SIZE - len(known))]
    assert len(known) == len(set(known)) == VOCAB_SIZE
    directory.mkdir(parents=True, exist_ok=True)
    text = _backend(known, special, words).to_str(pretty=True)
    (directory / "tokenizer.json").write_text(text + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": UNKNOWN,
        "eos_token": turn_end,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [token for token in special_tokens if token != turn_end],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": chat_template,
    }
    _write_json(directory / "tokenizer_config.json", config)
    stops = [known.index(turn_end), known.index(END_OF_TEXT)]
    generation = {"eos_token_id": stops, "pad_token_id": known.index(END_OF_TEXT)}
    _write_json(directory / "generation_config.json", generation)


def _backend(known: Sequence[str], special: Sequence[str], words: Sequence[str]) -> Tokenizer:
    ids = {word: i for i, word in enumerate(known)}
    backend: Any = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    pattern = "|".join([*(re.escape(word) for word in words), r"[\s\S]"])
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    backend.decoder = decoders.Fuse()
    markup = [word for word in known if len(word) > 1 and word not in {*special, *words}]
    backend.add_special_tokens([AddedToken(w, normalized=False, special=True) for w in special])
    backend.add_tokens([AddedToken(w, normalized=False) for w in markup])
    return backend


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
