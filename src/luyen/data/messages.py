"""Validation of conversations: roles, calls before results, text only, template markers found."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeGuard, final

from luyen.base.errors import UserError, did_you_mean
from luyen.base.records import Message, Prompt
from luyen.data.raw_values import is_list, is_object, parsed_json, without_none

ROLES = ("system", "developer", "user", "assistant", "tool")
Complain: TypeAlias = Callable[[str, Any, str, str], UserError]
"""Makes an error of field, value, reason and fix, and adds where the row stands."""


def check_conversation(value: Any, name: str, complain: Complain) -> list[Message]:
    """The messages, made uniform: content is text, call arguments are objects, no empty keys."""
    if not is_list(value) or not value:
        fix = 'write [{"role": "user", "content": ...}, ...]'
        raise complain(name, value, "a conversation is a list of messages", fix)
    found: list[Message] = []
    for i, raw in enumerate(value):
        message = _check_message(raw, f"{name}[{i}]", complain)
        if message["role"] == "tool" and not _answers_a_call(found):
            why = "a tool result follows the assistant message that called the tool"
            raise complain(f"{name}[{i}].role", "tool", why, "add the call, or another role")
        found.append(message)
    return found


def check_tools(value: Any, complain: Complain) -> list[Mapping[str, Any]]:
    """The tool schemas; each names its function. A name alone chooses among the run's tools."""
    if value is None:
        return []
    if not is_list(value):
        raise complain("tools", value, "tools are a list of schemas", "write [{...}, ...]")
    found: list[Mapping[str, Any]] = []
    for i, raw in enumerate(value):
        schema: dict[str, Any] = without_none(raw) if is_object(raw) else {}
        if isinstance(raw, str):
            schema = {"type": "function", "function": {"name": raw}}
        if not _names_a_function(schema.get("function", schema)):
            why = "a tool schema names its function"
            fix = 'write {"type": "function", "function": {"name": ..., "parameters": {...}}}'
            raise complain(f"tools[{i}]", raw, why, fix)
        found.append(schema)
    return found


def _check_message(raw: Any, name: str, complain: Complain) -> dict[str, Any]:
    if not is_object(raw):
        fix = 'write {"role": ..., "content": ...}'
        raise complain(name, raw, "a message is an object with named fields", fix)
    message: dict[str, Any] = without_none(raw)
    role = message.get("role")
    if role not in ROLES:
        raise complain(f"{name}.role", role, "no such role", did_you_mean(str(role), ROLES))
    if "tool_calls" in message:
        if role != "assistant":
            why = "only the assistant calls tools"
            raise complain(f"{name}.tool_calls", message["tool_calls"], why, "drop the field")
        calls = _check_calls(message["tool_calls"], f"{name}.tool_calls", complain)
        message = {**message, "tool_calls": calls}
        if not calls:
            del message["tool_calls"]
    message["content"] = _content(message, f"{name}.content", complain)
    return message


def _content(message: Mapping[str, Any], name: str, complain: Complain) -> str:
    content = message.get("content")
    if content is None and "tool_calls" in message:
        return ""
    if is_list(content):
        texts = [part["text"] for part in content if _is_text(part)]
        if len(texts) == len(content):
            return "".join(texts)
        raise complain(name, content, "Luyen trains text models", "keep only parts of type text")
    if not isinstance(content, str):
        raise complain(name, content, "the content of a message is text", "write a string")
    return content


def _check_calls(value: Any, name: str, complain: Complain) -> list[dict[str, Any]]:
    if not is_list(value):
        raise complain(name, value, "calls are a list", "write [{...}]")
    found: list[dict[str, Any]] = []
    for i, raw in enumerate(value):
        call = raw if is_object(raw) else {}
        function = call.get("function", call)
        if not _names_a_function(function):
            fix = 'write {"type": "function", "function": {"name": ..., "arguments": {...}}}'
            raise complain(f"{name}[{i}]", raw, "a call names its function", fix)
        where = f"{name}[{i}].function.arguments"
        arguments = _arguments(function.get("arguments", {}), where, complain)
        around = call if function is not call else {}
        inner = {**function, "arguments": arguments}
        found.append({**around, "type": "function", "function": inner})
    return found


def _arguments(value: Any, name: str, complain: Complain) -> dict[str, Any]:
    """Arguments as an object: templates write it as JSON, and would quote a text twice."""
    fix = "write an object, or an object as JSON text"
    if isinstance(value, str):
        try:
            value = parsed_json(value)
        except ValueError as error:
            raise complain(name, value, f"arguments are not valid JSON: {error}", fix) from error
    if not is_object(value):
        raise complain(name, value, "arguments are an object", fix)
    return value


def _answers_a_call(before: list[Message]) -> bool:
    last = next((m for m in reversed(before) if m["role"] != "tool"), None)
    return last is not None and "tool_calls" in last


def _names_a_function(value: Any) -> TypeGuard[dict[str, Any]]:
    return is_object(value) and isinstance(value.get("name"), str) and value["name"] != ""


def _is_text(part: Any) -> bool:
    return is_object(part) and part.get("type") == "text" and isinstance(part.get("text"), str)


# Chat-template markers inside rows: text that a tokenizer would take for structure.

MARKERS = (
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "[INST]",
    "[/INST]",
    "<<SYS>>",
)
"""Markers of the common templates: a row that has one was probably rendered before."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MarkerHit:
    """A marker found in rows.

    Example:
        >>> str(MarkerHit(marker="[INST]", rows=3, first="a.jsonl row 2"))
        '[INST] in 3 rows, first in a.jsonl row 2'
    """

    marker: str
    """The text."""
    rows: int
    """In how many rows it stands."""
    first: str
    """The first of them."""

    def __str__(self) -> str:
        unit = "row" if self.rows == 1 else "rows"
        return f"{self.marker} in {self.rows} {unit}, first in {self.first}"


def find_markers(
    prompts: Sequence[Prompt], origins: Sequence[str], special_tokens: Iterable[str]
) -> tuple[MarkerHit, ...]:
    """Every marker that stands in the text of a message: common ones and the tokenizer's own."""
    searched = sorted({*MARKERS, *special_tokens})
    found: dict[str, MarkerHit] = {}
    for prompt, origin in zip(prompts, origins, strict=True):
        text = "\n".join(str(message["content"]) for message in prompt.messages)
        for marker in searched:
            if marker in text:
                hit = found.get(marker) or MarkerHit(marker=marker, rows=0, first=origin)
                found[marker] = replace(hit, rows=hit.rows + 1)
    return tuple(found.values())
