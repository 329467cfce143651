"""One tiny row per format, and what it becomes; a template that no row fits."""

import json
import tempfile
from pathlib import Path
from typing import Any

from luyen.data.formats.records import (
    ConversationRow,
    LabelledRow,
    PreferenceRow,
    SteppedRow,
    TextRow,
)
from luyen.data.render import Renderer
from luyen.data.tokenizer import load_tokenizer
from tests.character_tokenizer import CHATML, build_character_tokenizer
from tests.unit.data.templates import assistant, user

SYSTEM = {"role": "system", "content": "s"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
TOOL = {"name": "add", "parameters": {"type": "object"}}


def said(who: str, text: str) -> dict[str, str]:
    return {"from": who, "value": text}


def pair(prompt: Any, chosen: Any, rejected: Any, **more: Any) -> PreferenceRow:
    return PreferenceRow(prompt=prompt, chosen=chosen, rejected=rejected, **more)


PAIR = pair((user("q"),), (assistant("a"),), (assistant("b"),))
CASES: dict[str, tuple[str, dict[str, Any], Any]] = {
    "GSM8K": (
        "question-answer",
        {"question": "q", "answer": "a", "id": 7},
        ConversationRow(
            messages=(user("q"), assistant("a")), weights=(0.0, 1.0), extra_info={"id": 7}
        ),
    ),
    "TRL, text": ("preference", {"prompt": "q", "chosen": "a", "rejected": "b"}, PAIR),
    "TRL, messages": (
        "preference",
        {
            "prompt": [user("q")],
            "chosen": [assistant("a")],
            "rejected": [assistant("b")],
            "margin": 2,
            "tools": json.dumps([TOOL]),
            "chat_template_kwargs": {"enable_thinking": False},
            "id": 7,
        },
        pair(
            (user("q"),),
            (assistant("a"),),
            (assistant("b"),),
            margin=2.0,
            tools=(TOOL,),
            template_kwargs={"enable_thinking": False},
            extra_info={"id": 7},
        ),
    ),
    "TRL, implicit prompt": (
        "preference",
        {"chosen": [user("q"), assistant("a")], "rejected": [user("q"), assistant("b")]},
        PAIR,
    ),
    "implicit prompt, one goes on": (
        "preference",
        {
            "chosen": [user("q"), assistant("a")],
            "rejected": [user("q"), assistant("a"), user("r"), assistant("b")],
        },
        pair((user("q"),), (assistant("a"),), (assistant("a"), user("r"), assistant("b"))),
    ),
    "prompt as text beside whole conversations": (
        "preference",
        {
            "prompt": "q",
            "chosen": [user("q"), assistant("a")],
            "rejected": [user("q"), assistant("b")],
            "messages": [user("q"), assistant("a")],
        },
        pair(
            (user("q"),),
            (assistant("a"),),
            (assistant("b"),),
            extra_info={"messages": [user("q"), assistant("a")]},
        ),
    ),
    "marked dialogue": (
        "preference",
        {
            "chosen": "\n\nHuman: q\n\nAssistant: a",
            "rejected": "\n\nHuman: q\n\nAssistant: b",
        },
        PAIR,
    ),
    "from and value in a pair": (
        "preference",
        {
            "chosen": [said("human", "q"), said("gpt", "a")],
            "rejected": [said("human", "q"), said("gpt", "b")],
        },
        PAIR,
    ),
    "unpaired": (
        "labelled",
        {"prompt": "q", "completion": "a", "label": False},
        LabelledRow(prompt=(user("q"),), completion=(assistant("a"),), label=False),
    ),
    "stepwise": (
        "stepped",
        {"prompt": "q", "completions": ["a", "b", "c"], "labels": [True, False, None]},
        SteppedRow(prompt=(user("q"),), steps=("a", "b", "c"), labels=(1.0, 0.0, None)),
    ),
    "prompt and completion": (
        "prompt-completion",
        {"prompt": [user("q"), assistant("a"), user("r")], "completion": [assistant("b")]},
        ConversationRow(
            messages=(user("q"), assistant("a"), user("r"), assistant("b")),
            weights=(0.0, 0.0, 0.0, 1.0),
        ),
    ),
    "messages": (
        "conversation",
        {"messages": [SYSTEM, user("q"), assistant("a")], "text": "rendered before"},
        ConversationRow(
            messages=(SYSTEM, user("q"), assistant("a")),
            weights=(0.0, 0.0, 1.0),
            extra_info={"text": "rendered before"},
        ),
    ),
    "Axolotl, trained by message": (
        "conversation",
        {
            "messages": [
                user("q"),
                {**assistant("a"), "train": False},
                {**user("r"), "weight": 0},
                {**assistant("b"), "weight": 0.5},
                {**assistant("c"), "training": True},
            ]
        },
        ConversationRow(
            messages=(user("q"), assistant("a"), user("r"), assistant("b"), assistant("c")),
            weights=(0.0, 0.0, 0.0, 0.5, 1.0),
        ),
    ),
    "text": ("text", {"text": "abc"}, TextRow(text="abc")),
    "ShareGPT with tools": (
        "sharegpt",
        {
            "conversations": [
                said("human", "q"),
                said("function_call", json.dumps({"name": "add", "arguments": {"a": 1}})),
                said("observation", "1"),
                said("gpt", "a"),
            ],
            "system": "s",
            "tools": json.dumps([TOOL]),
        },
        ConversationRow(
            messages=(SYSTEM, user("q"), CALLED, {"role": "tool", "content": "1"}, assistant("a")),
            weights=(0.0, 0.0, 1.0, 0.0, 1.0),
            tools=(TOOL,),
        ),
    ),
    "ShareGPT, ranked": (
        "sharegpt-preference",
        {
            "conversations": [said("human", "q")],
            "chosen": said("gpt", "a"),
            "rejected": said("gpt", "b"),
        },
        PAIR,
    ),
    "ShareGPT, judged": (
        "sharegpt-labelled",
        {"messages": [user("q"), assistant("a")], "kto_tag": True},
        LabelledRow(prompt=(user("q"),), completion=(assistant("a"),), label=True),
    ),
    "alpaca": (
        "alpaca",
        {
            "instruction": "q",
            "input": "i",
            "output": "a",
            "system": "s",
            "history": [["h", "k"]],
        },
        ConversationRow(
            messages=(SYSTEM, user("h"), assistant("k"), user("q\ni"), assistant("a")),
            weights=(0.0, 0.0, 1.0, 0.0, 1.0),
        ),
    ),
    "alpaca, ranked": (
        "alpaca-preference",
        {"instruction": "q", "input": "", "chosen": "a", "rejected": "b"},
        PAIR,
    ),
    "alpaca, judged": (
        "alpaca-labelled",
        {"instruction": "q", "output": "a", "kto_tag": "false"},
        LabelledRow(prompt=(user("q"),), completion=(assistant("a"),), label=False),
    ),
}


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ANSWER_CHANGES_PROMPT = (
    "{{- '<|im_start|>system\\n' + messages[-1].content | length | string + '<|im_end|>\\n' -}}"
    + CHATML
)
"""What stands before an answer depends on the answer."""


def worn(template: str) -> Renderer:
    """A renderer with this template."""
    with tempfile.TemporaryDirectory() as folder:
        build_character_tokenizer(Path(folder), chat_template=template)
        return Renderer(load_tokenizer(folder))
