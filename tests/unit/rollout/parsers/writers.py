"""Every format's own way of writing an assistant turn, for tests that read it back."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from luyen.rollout.parsers.json_formats import (
    DEEPSEEK_CALL_BEGIN,
    DEEPSEEK_CALL_END,
    DEEPSEEK_CALLS_BEGIN,
    DEEPSEEK_CALLS_END,
    DEEPSEEK_SEPARATOR,
)
from luyen.rollout.parsers.protocol import ParsedTurn, WrittenCall

Calls = Sequence[WrittenCall]


def hermes(content: str, calls: Calls) -> str:
    bodies = [json.dumps({"name": c.name, "arguments": c.arguments}) for c in calls]
    return "\n".join([content, *(f"<tool_call>\n{body}\n</tool_call>" for body in bodies)])


def qwen3_coder(content: str, calls: Calls) -> str:
    def one(call: WrittenCall) -> str:
        values = (f"<parameter={k}>\n{v}\n</parameter>\n" for k, v in call.arguments.items())
        return f"<tool_call>\n<function={call.name}>\n{''.join(values)}</function>\n</tool_call>"

    return "\n".join([content, *map(one, calls)])


def glm(content: str, calls: Calls) -> str:
    def one(call: WrittenCall) -> str:
        pairs = (
            f"<arg_key>{k}</arg_key>\n<arg_value>{v}</arg_value>\n"
            for k, v in call.arguments.items()
        )
        return f"<tool_call>{call.name}\n{''.join(pairs)}</tool_call>"

    return "\n".join([content, *map(one, calls)])


def glm_one_line(content: str, calls: Calls) -> str:
    def one(call: WrittenCall) -> str:
        pairs = (
            f"<arg_key>{k}</arg_key><arg_value>{v}</arg_value>" for k, v in call.arguments.items()
        )
        return f"<tool_call>{call.name}{''.join(pairs)}</tool_call>"

    return content + "".join(map(one, calls))


def llama3(content: str, calls: Calls) -> str:
    bodies = [json.dumps({"name": c.name, "parameters": c.arguments}) for c in calls]
    return f"{content}<|python_tag|>{'; '.join(bodies)}"


def llama3_bare(content: str, calls: Calls) -> str:
    thought = f"<think>{content}</think>" if content else ""
    return thought + llama3("", calls).removeprefix("<|python_tag|>")


def llama3_pythonic(content: str, calls: Calls) -> str:
    def one(call: WrittenCall) -> str:
        return f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})"

    return f"{content}<|python_tag|>[{', '.join(map(one, calls))}]"


def mistral(content: str, calls: Calls) -> str:
    items = [{"name": c.name, "arguments": c.arguments, "id": "aB3dE5gH7"} for c in calls]
    return f"{content}[TOOL_CALLS]{json.dumps(items, ensure_ascii=False)}"


def mistral_v11(content: str, calls: Calls) -> str:
    return content + "".join(f"[TOOL_CALLS]{c.name}[ARGS]{json.dumps(c.arguments)}" for c in calls)


def mistral_with_ids(content: str, calls: Calls) -> str:
    return content + "".join(
        f"[TOOL_CALLS]{c.name}[CALL_ID]aB3dE5gH7[ARGS]{json.dumps(c.arguments)}" for c in calls
    )


def deepseek_v3(content: str, calls: Calls) -> str:
    parts = (
        f"{DEEPSEEK_CALL_BEGIN}function{DEEPSEEK_SEPARATOR}{c.name}\n```json\n{json.dumps(c.arguments)}\n```{DEEPSEEK_CALL_END}"
        for c in calls
    )
    return content + DEEPSEEK_CALLS_BEGIN + "\n".join(parts) + DEEPSEEK_CALLS_END


def deepseek_v31(content: str, calls: Calls) -> str:
    parts = (
        f"{DEEPSEEK_CALL_BEGIN}{c.name}{DEEPSEEK_SEPARATOR}{json.dumps(c.arguments)}{DEEPSEEK_CALL_END}"
        for c in calls
    )
    return content + DEEPSEEK_CALLS_BEGIN + "".join(parts) + DEEPSEEK_CALLS_END


def gpt_oss(content: str, calls: Calls) -> str:
    thought = f"<|channel|>analysis<|message|>{content}"
    heads = (
        f"<|channel|>commentary to=functions.{c.name} <|constrain|>json<|message|>"
        + json.dumps(c.arguments)
        for c in calls
    )
    return "<|end|><|start|>assistant".join([thought, *heads])


def gpt_oss_recipient_first(content: str, calls: Calls) -> str:
    thought = f"<|channel|>analysis<|message|>{content}"
    heads = (
        f" to=functions.{c.name}<|channel|>commentary json<|message|>{json.dumps(c.arguments)}"
        for c in calls
    )
    return "<|end|><|start|>assistant".join([thought, *heads])


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    """A way to write, the parser that reads it, and what its calls look like."""

    parser: str
    write: Callable[[str, Calls], str]
    opening: str
    """From where on a call has begun, beyond doubt."""
    text_values: bool = False
    complete: str = "}"
    """Behind the last of these, the last call is whole."""


WRITINGS = {
    w.write.__name__: w
    for w in (
        Writing(parser="hermes", write=hermes, opening="<tool_call>", complete="</tool_call>"),
        Writing(
            parser="qwen3_coder",
            write=qwen3_coder,
            opening="<tool_call>",
            text_values=True,
            complete="</tool_call>",
        ),
        Writing(
            parser="glm",
            write=glm,
            opening="<tool_call>",
            text_values=True,
            complete="</tool_call>",
        ),
        Writing(
            parser="glm",
            write=glm_one_line,
            opening="<tool_call>",
            text_values=True,
            complete="</tool_call>",
        ),
        Writing(parser="llama3", write=llama3, opening="<|python_tag|>"),
        Writing(parser="llama3", write=llama3_bare, opening='{"name":'),
        Writing(parser="llama3", write=llama3_pythonic, opening="<|python_tag|>", complete="]"),
        Writing(parser="mistral", write=mistral, opening="[TOOL_CALLS]", complete="]"),
        Writing(parser="mistral", write=mistral_v11, opening="[TOOL_CALLS]"),
        Writing(parser="mistral", write=mistral_with_ids, opening="[TOOL_CALLS]"),
        Writing(
            parser="deepseek",
            write=deepseek_v3,
            opening=DEEPSEEK_CALL_BEGIN,
            complete=DEEPSEEK_CALL_END,
        ),
        Writing(
            parser="deepseek",
            write=deepseek_v31,
            opening=DEEPSEEK_CALL_BEGIN,
            complete=DEEPSEEK_CALL_END,
        ),
        Writing(parser="gpt_oss", write=gpt_oss, opening="to=functions."),
        Writing(parser="gpt_oss", write=gpt_oss_recipient_first, opening="to=functions."),
    )
}

FRAGMENTS = (
    *("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=x>"),
    *("</parameter>", "<arg_key>k</arg_key>", "<arg_value>", "</arg_value>", "<|python_tag|>"),
    *(
        "[TOOL_CALLS]",
        "[ARGS]",
        "[CALL_ID]",
        DEEPSEEK_CALLS_BEGIN,
        DEEPSEEK_CALL_BEGIN,
        DEEPSEEK_SEPARATOR,
        DEEPSEEK_CALL_END,
    ),
    *(
        DEEPSEEK_CALLS_END,
        "```json\n",
        "\n```",
        "<|start|>",
        "assistant",
        "<|channel|>",
        "commentary",
    ),
    *("analysis", "final", " to=functions.f", "<|constrain|>json", "<|message|>", "<|end|>"),
    *("<|call|>", "<|return|>", "function", "name", "f(x=1)", "f(", ")", ";", "=", "'", "\\"),
    *('{"name": "f", "arguments": {"x": 1}}', '{"name": "f", "parameters": {}}', '{"x": 1}'),
    *("{", "}", "[", "]", '"', ",", ":", "NaN", "1e999", "\\ud800", "\ud800", "\n", " ", "\0"),
    *('"name":', '"arguments":', "null", "é", "[]", "[{}]"),
)
THINKING = ("<think>", "</think>", "[THINK]", "[/THINK]")


def hostile(*extra: str) -> st.SearchStrategy[str]:
    """Text of marks, pieces of JSON and anything else, in any order."""
    parts = st.one_of(st.sampled_from((*FRAGMENTS, *extra)), st.text(max_size=3))
    return st.lists(parts, max_size=14).map("".join)


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
STRINGS = st.one_of(st.text(max_size=8), hostile().map(lambda text: text.replace("\ud800", "")))
JSON_VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(allow_nan=False, allow_infinity=False)
    | STRINGS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
PLAIN_VALUES = STRINGS.filter(
    lambda text: not any(tag in text for tag in ("<parameter", "</param", "<arg_", "</arg_"))
)


def calls(*, text_values: bool) -> st.SearchStrategy[list[WrittenCall]]:
    """One to three calls; some formats write every value as plain text."""
    values = PLAIN_VALUES if text_values else JSON_VALUES
    arguments = st.dictionaries(NAMES, values, max_size=3)
    made = st.builds(WrittenCall, name=NAMES, arguments=arguments)
    return st.lists(made, min_size=1, max_size=3)


def shape(parsed: ParsedTurn) -> str:
    """What was read, with 1, 1.0 and True told apart."""
    return repr([(call.name, dict(call.arguments)) for call in parsed.calls])
