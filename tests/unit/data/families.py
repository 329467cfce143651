"""Templates that behave like those of the families people train, and how their policies write."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from luyen.base.records import Message, Source
from luyen.data.render import Extension, Renderer, assistant_message, call_id, tool_message
from luyen.data.tokenizer import load_tokenizer
from tests.character_tokenizer import build_character_tokenizer

HOME = Path(__file__).parents[2] / "data" / "templates"
Call = tuple[str, dict[str, Any]]
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}
]


def tagged(content: str, calls: Sequence[Call], turn: int) -> str:
    """Calls in tags, each on lines of its own."""
    written = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(given, ensure_ascii=False)}}}'
        "\n</tool_call>"
        for name, given in calls
    ]
    return "\n".join([*([content] if content or not calls else []), *written])


def bare(content: str, calls: Sequence[Call], turn: int) -> str:
    """Calls as JSON, one after the other; Llama says nothing besides."""
    written = [
        f'{{"name": "{name}", "parameters": {json.dumps(given, ensure_ascii=False)}}}'
        for name, given in calls
    ]
    return "; ".join(written) or content


def listed(content: str, calls: Sequence[Call], turn: int) -> str:
    """Calls as a list with ids, after a special token; Mistral says nothing besides."""
    written = [
        json.dumps({"name": name, "arguments": given, "id": call_id(turn, i)}, ensure_ascii=False)
        for i, (name, given) in enumerate(calls)
    ]
    return f"[TOOL_CALLS][{', '.join(written)}]" if calls else content


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A template with its special tokens, and the policy's way of writing calls."""

    special: tuple[str, ...]
    turn_end: str
    write: Callable[[str, Sequence[Call], int], str]
    has_words_beside_calls: bool = True
    most_calls: int = 2


CHATML = ("<|im_start|>", "<|im_end|>")
HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MISTRAL = ("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]")
MISTRAL = (*MISTRAL, "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]")
HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>")
FAMILIES = {
    "qwen2_5": Family(special=CHATML, turn_end="<|im_end|>", write=tagged),
    "qwen3": Family(special=CHATML, turn_end="<|im_end|>", write=tagged),
    "smollm2": Family(special=CHATML, turn_end="<|im_end|>", write=tagged),
    "llama3": Family(
        special=HEADERS, turn_end="<|eot_id|>", write=bare, has_words_beside_calls=False
    ),
    "mistral": Family(special=MISTRAL, turn_end="</s>", write=listed, has_words_beside_calls=False),
    "gpt_oss": Family(special=HARMONY, turn_end="<|return|>", write=tagged),
}
STABLE = ("qwen2_5", "smollm2", "llama3", "mistral")
"""Families whose template never changes what was said."""


@lru_cache
def family_renderer(name: str) -> Renderer:
    """A renderer over the character tokenizer that wears the family's template."""
    family = FAMILIES[name]
    with tempfile.TemporaryDirectory() as folder:
        build_character_tokenizer(
            Path(folder),
            chat_template=(HOME / f"{name}_like.jinja").read_text(),
            special_tokens=family.special,
            turn_end=family.turn_end,
        )
        if name == "gpt_oss":  # the model's generation config names the end of a call as well
            file = Path(folder) / "generation_config.json"
            stops = json.loads(file.read_text())
            stops["eos_token_id"].append(2 + HARMONY.index("<|call|>"))
            file.write_text(json.dumps(stops))
        return Renderer(load_tokenizer(folder))


@dataclass(slots=True)
class Played:
    """A conversation that grows as a rollout does."""

    renderer: Renderer
    messages: list[Message]
    tools: Sequence[dict[str, Any]] = ()
    tokens: list[int] = field(default_factory=list)
    sources: list[Source] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    turn: int = 0
    restarts: list[str] = field(default_factory=list)
    last: Extension | None = None

    def __post_init__(self) -> None:
        self._append(self.renderer.prompt_tokens(self.messages, self.tools), Source.PROMPT)

    def say(
        self, written: str, content: str, calls: Sequence[Call] = (), *, end: str | None = None
    ) -> None:
        """The policy samples a turn; without `end` it is cut off."""
        encode = self.renderer.tokenizer.encode
        self._append([*encode(written), *encode(end or "")], Source.SAMPLED)
        self.messages.append(assistant_message(content, calls, turn=self.turn, written=written))

    def hear(self, *new: Message) -> Extension:
        """The world answers."""
        found = self.renderer.extend(self.tokens, self.messages, new, self.tools)
        self.turn += 1
        if found.restart is not None:
            self.restarts.append(found.restart)
            self.tokens, self.sources, self.turns = [], [], []
        self.tokens += found.tokens
        self.sources += found.sources
        self.turns += [self.turn] * len(found.tokens)
        self.messages += new
        self.last = found
        return found

    def results(self, *texts: str) -> Extension:
        """Tools answer the calls of the turn."""
        turn = self.turn
        return self.hear(
            *(tool_message("add", text, turn=turn, index=i) for i, text in enumerate(texts))
        )

    @property
    def streams(self) -> dict[str, Any]:
        """What the comparison takes."""
        names = ("tokens", "sources", "turns", "messages", "tools")
        return {name: getattr(self, name) for name in names}

    def _append(self, ids: Sequence[int], source: Source) -> None:
        self.tokens += ids
        self.sources += [source] * len(ids)
        self.turns += [self.turn] * len(ids)
