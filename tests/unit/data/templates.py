"""Small chat templates in the manner of the common ones, on the character tokenizer."""

import tempfile
from functools import lru_cache
from pathlib import Path

from luyen.base.records import Source
from luyen.data.render import Rendered, Renderer
from luyen.data.tokenizer import Tokenizer, load_tokenizer
from tests.character_tokenizer import CHATML, build_character_tokenizer

HEADERS = """\
{{- '<|begin_of_text|>' -}}
{%- for m in messages -%}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' + m.content | trim + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n' -}}
{%- endif -%}
"""
"""In the manner of Llama 3: no place for tools, content trimmed, nothing after a turn's end."""

FORGETS = """\
{%- for m in messages -%}
{%- set said = m.content if loop.last else m.content.split('</think>')[-1] -%}
{{- '<|im_start|>' + m.role + '\n' + said + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""
"""Thinking is taken out of every message but the last: history is rewritten."""

OPENS_THINKING = """\
{%- for m in messages -%}
{{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n<think>' -}}{%- endif -%}
"""
"""The generation prompt opens a thought that the template does not write for a given answer."""

PLAIN = """\
{%- for m in messages -%}{{- m.role + ': ' + m.content + '\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}
"""
"""No special token at all."""

ALWAYS_PROMPTS = HEADERS.replace("{%- if add_generation_prompt -%}", "").replace(
    "{%- endif -%}", ""
)
"""As the first template of Llama 3: the assistant is always asked to go on."""

HEADER_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
TEMPLATES = {
    "chatml": CHATML,
    "headers": HEADERS,
    "forgets": FORGETS,
    "opens thinking": OPENS_THINKING,
    "plain": PLAIN,
    "always prompts": ALWAYS_PROMPTS,
}


@lru_cache
def tokenizer(name: str) -> Tokenizer:
    """A tokenizer that wears the named template."""
    with tempfile.TemporaryDirectory() as folder:
        if name in ("headers", "always prompts"):
            build_character_tokenizer(
                Path(folder),
                chat_template=TEMPLATES[name],
                special_tokens=HEADER_TOKENS,
                turn_end="<|eot_id|>",
            )
        else:
            build_character_tokenizer(Path(folder), chat_template=TEMPLATES[name])
        return load_tokenizer(folder)


def renderer(name: str) -> Renderer:
    """A renderer for the named template."""
    return Renderer(tokenizer(name))


def pieces(branch: Rendered, shown: Renderer) -> list[tuple[str, int, str]]:
    """(source, turn, text) of each run of tokens with one origin."""
    runs: list[tuple[Source, int, list[int]]] = []
    for token, source, turn in zip(branch.tokens, branch.sources, branch.turns, strict=True):
        if not runs or runs[-1][:2] != (source, turn):
            runs.append((source, turn, []))
        runs[-1][2].append(token)
    decode = shown.tokenizer.decode
    return [(s.name, turn, decode(ids, skip_special=False)) for s, turn, ids in runs]


def user(content: str) -> dict[str, str]:
    """A user's message."""
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, str]:
    """An assistant's message."""
    return {"role": "assistant", "content": content}
