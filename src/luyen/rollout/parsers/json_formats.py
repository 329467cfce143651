"""Formats with JSON arguments: Hermes (Qwen 2.5 and 3), Mistral, DeepSeek and gpt-oss."""

import re
from dataclasses import dataclass
from typing import Any, cast, final

from luyen.rollout.parsers.protocol import (
    Attempt,
    ParsedTurn,
    Piece,
    behind_failure,
    call_from_object,
    call_from_parts,
    gathered,
    marks,
    quoted,
    read_json,
    scan,
    tool_parsers,
)

_HERMES_MARKS = marks(r"</?tool_call>")
_HERMES_STOPS = re.compile(r"(?P<close></tool_call>)|<tool_call>|</?think>")
_HERMES_CLOSE = re.compile(r"\s*</tool_call>")


@tool_parsers.register("hermes", stop_tokens=(), values="json")
def parse_hermes(text: str) -> ParsedTurn:
    """Calls in the format of Hermes.

    The JSON is read from the opening tag on, so a closing tag inside a string ends nothing.

    Example:
        >>> text = 'Yes.\\n<tool_call>\\n{"name": "f", "arguments": {"x": 1}}\\n</tool_call>'
        >>> parsed = parse_hermes(text)
        >>> parsed.content, parsed.calls[0].name, parsed.calls[0].arguments
        ('Yes.', 'f', {'x': 1})
    """
    return scan(text, _HERMES_MARKS, _read_hermes)


def _read_hermes(text: str, mark: re.Match[str]) -> Piece:
    if mark.group().startswith("</"):
        return Piece(end=mark.end(), attempts=("</tool_call> has no <tool_call> before it",))
    found = read_json(text, mark.end())
    close = _HERMES_CLOSE.match(text, found.end)
    attempt: Attempt
    if found.fault is not None:
        attempt = f"the call is not valid JSON: {found.fault}"
    elif close is None:
        attempt = "the call is not closed: </tool_call> must follow the JSON object"
    else:
        return Piece(end=close.end(), attempts=(call_from_object(found.value),))
    return Piece(end=behind_failure(text, found.end, _HERMES_STOPS), attempts=(attempt,))


# Mistral, in both of its forms.
#
# Tokenizers before version 11 list the calls: `[TOOL_CALLS][{"name": ..., "arguments":
# {...}}]`. Later ones repeat the token: `[TOOL_CALLS]NAME[ARGS]{...}`, some with `[CALL_ID]ID`
# before `[ARGS]`, and the first of them without `[ARGS]`. Thinking stands in
# `[THINK]...[/THINK]` or in `<think>...</think>`.

_MISTRAL_MARKS = marks(r"\[TOOL_CALLS\]", r"<think>|\[THINK\]", r"</think>|\[/THINK\]")
_MISTRAL_STOPS = re.compile(r"\[TOOL_CALLS\]|</?think>|\[/?THINK\]")
_MISTRAL_LIST = re.compile(r"\s*\[(?!ARGS\]|CALL_ID\]|TOOL_CALLS\])")
_MISTRAL_NAME = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\]|(?=\{))")


@tool_parsers.register("mistral", stop_tokens=(), values="json")
def parse_mistral(text: str) -> ParsedTurn:
    """Calls in the formats of Mistral.

    Example:
        >>> parse_mistral('[TOOL_CALLS]f[ARGS]{"x": 1}').calls[0].arguments
        {'x': 1}
        >>> parse_mistral('[TOOL_CALLS][{"name": "f", "arguments": {}}]').calls[0].name
        'f'
    """
    return scan(text, _MISTRAL_MARKS, _read_mistral)


def _read_mistral(text: str, mark: re.Match[str]) -> Piece:
    if _MISTRAL_LIST.match(text, mark.end()):
        return _read_mistral_list(text, mark.end())
    name = _MISTRAL_NAME.match(text, mark.end())
    if name is None:
        return _mistral_failure(
            text, mark.end(), "a list of calls, or NAME[ARGS]{...}, must follow [TOOL_CALLS]"
        )
    found = read_json(text, name.end())
    if found.fault is not None:
        why = f"the arguments of {quoted(name.group(1))} are not valid JSON: {found.fault}"
        return _mistral_failure(text, found.end, why)
    return Piece(end=found.end, attempts=(call_from_parts(name.group(1), found.value),))


def _read_mistral_list(text: str, at: int) -> Piece:
    found = read_json(text, at)
    if found.fault is not None:
        return _mistral_failure(
            text, found.end, f"the list of calls is not valid JSON: {found.fault}"
        )
    items = cast(list[Any], found.value)
    if not items:
        return Piece(end=found.end, attempts=("the list of calls is empty",))
    return Piece(end=found.end, attempts=tuple(call_from_object(item) for item in items))


def _mistral_failure(text: str, at: int, why: str) -> Piece:
    # JSON takes the bracket that a token begins with for a list and fails one behind it.
    return Piece(end=behind_failure(text, at - 1, _MISTRAL_STOPS), attempts=(why,))


# DeepSeek V3, R1 and V3.1. The bars and blanks of its special tokens are not ASCII.
#
# With `[...]` for the special tokens, V3.1 writes
#
#     [tool calls begin][tool call begin]NAME[tool sep]{...}[tool call end][tool calls end]
#
# and V3 and R1 write `function` for the name, and the name and fenced JSON behind the
# separator:
#
#     [tool call begin]function[tool sep]NAME
#     ```json
#     {...}
#     ```[tool call end]
#
# Both are read. The tokens around all calls may be missing; those around a call may not.


def _token(words: str) -> str:
    """The special token of these words, with the fullwidth bar and the block for a blank."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


DEEPSEEK_CALLS_BEGIN, DEEPSEEK_CALLS_END = _token("tool calls begin"), _token("tool calls end")
DEEPSEEK_CALL_BEGIN, DEEPSEEK_SEPARATOR, DEEPSEEK_CALL_END = (
    _token("tool call begin"),
    _token("tool sep"),
    _token("tool call end"),
)

_DEEPSEEK_MARKS = marks(
    f"(?:{DEEPSEEK_CALLS_BEGIN}\\s*)?{DEEPSEEK_CALL_BEGIN}|{DEEPSEEK_CALLS_BEGIN}|{DEEPSEEK_CALL_END}|{DEEPSEEK_CALLS_END}"
)
_DEEPSEEK_STOPS = re.compile(
    f"(?P<close>{DEEPSEEK_CALL_END}(?:\\s*{DEEPSEEK_CALLS_END})?|{DEEPSEEK_CALLS_END})|{DEEPSEEK_CALLS_BEGIN}|{DEEPSEEK_CALL_BEGIN}|</?think>"
)
_DEEPSEEK_HEAD = re.compile(f"\\s*([^\\s<]+)\\s*{DEEPSEEK_SEPARATOR}")
_DEEPSEEK_FENCED = re.compile(r"\s*([^\s{`]+)\s*```(?:json)?(?=\s)")
_DEEPSEEK_CLOSE = re.compile(f"\\s*{DEEPSEEK_CALL_END}(?:\\s*{DEEPSEEK_CALLS_END})?")
_DEEPSEEK_CLOSE_FENCED = re.compile(f"\\s*```\\s*{DEEPSEEK_CALL_END}(?:\\s*{DEEPSEEK_CALLS_END})?")


@tool_parsers.register("deepseek", stop_tokens=(), values="json")
def parse_deepseek(text: str) -> ParsedTurn:
    """Calls in the formats of DeepSeek V3, R1 and V3.1.

    Example:
        >>> call = f'{DEEPSEEK_CALL_BEGIN}f{DEEPSEEK_SEPARATOR}{{"x": 1}}{DEEPSEEK_CALL_END}'
        >>> parse_deepseek(DEEPSEEK_CALLS_BEGIN + call + DEEPSEEK_CALLS_END).calls[0].arguments
        {'x': 1}
    """
    return scan(text, _DEEPSEEK_MARKS, _read_deepseek)


def _read_deepseek(text: str, mark: re.Match[str]) -> Piece:
    if not mark.group().endswith(DEEPSEEK_CALL_BEGIN):
        return Piece(end=mark.end(), attempts=(_out_of_place(mark.group()),))
    head = _DEEPSEEK_HEAD.match(text, mark.end())
    if head is None:
        return _deepseek_failure(
            text, mark.end(), "the call must begin with a name and the separator token"
        )
    name, at, close_pattern = head.group(1), head.end(), _DEEPSEEK_CLOSE
    if name == "function" and (fenced := _DEEPSEEK_FENCED.match(text, at)) is not None:
        name, at, close_pattern = fenced.group(1), fenced.end(), _DEEPSEEK_CLOSE_FENCED
    found = read_json(text, at)
    if found.fault is not None:
        why = f"the arguments of {quoted(name)} are not valid JSON: {found.fault}"
        return _deepseek_failure(text, found.end, why)
    close = close_pattern.match(text, found.end)
    if close is None:
        return _deepseek_failure(text, found.end, f"the call of {quoted(name)} is not closed")
    return Piece(end=close.end(), attempts=(call_from_parts(name, found.value),))


def _out_of_place(token: str) -> str:
    if token == DEEPSEEK_CALLS_BEGIN:
        return "the tool calls are opened, but no call follows"
    return "a tool call is closed that was not opened"


def _deepseek_failure(text: str, at: int, why: str) -> Piece:
    return Piece(end=behind_failure(text, at, _DEEPSEEK_STOPS), attempts=(why,))


# gpt-oss: the messages of the Harmony format.
#
#     <|channel|>analysis<|message|>...<|end|>
#     <|start|>assistant<|channel|>commentary to=functions.NAME
#         <|constrain|>json<|message|>{}<|call|>
#
# The recipient may also stand before the channel. A message with a recipient is a call on any
# channel; any other message is text, even if it contains the text of a call.
#
# Content is what the family's template takes as content: text without the marks of the
# messages. In a turn that calls or tries to, that is thinking and preamble; otherwise it is the
# final message, and thinking only where there is none.

_GPT_OSS_MESSAGE_OR_START = re.compile(r"<\|message\|>|<\|start\|>")
_GPT_OSS_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_GPT_OSS_RECIPIENT = re.compile(r"(?:^|[\s>])to=([^\s<]*)")
_GPT_OSS_MARK = re.compile(r"<\|(?:start|end|message|channel|constrain|return|call)\|>")
_GPT_OSS_BODY_END = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)")
_GPT_OSS_CALL_END = re.compile(r"\s*(?:<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z)")
_GPT_OSS_NO_TOOL = frozenset(("assistant", "user", "all", "system", "developer"))
_GPT_OSS_NAMESPACE = "functions."


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _HarmonyMessage:
    """One message: what it says on which channel, or what it calls.

    Example:
        >>> _HarmonyMessage(channel="final", text="42", end=30).attempt is None
        True
    """

    channel: str
    """Name of the channel; empty when none is given."""
    text: str
    """Its text; empty for a well-formed call."""
    end: int
    """The position behind it."""
    attempt: Attempt | None = None
    """The call, or what is wrong with it; None for a message that is only text."""


@tool_parsers.register("gpt_oss", stop_tokens=("<|call|>", "<|return|>"), values="json")
def parse_gpt_oss(text: str) -> ParsedTurn:
    """Calls in the Harmony format, from a text that begins behind `<|start|>assistant`.

    Example:
        >>> head = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        >>> parse_gpt_oss(head + '{"x": 1}').calls[0].arguments
        {'x': 1}
        >>> parse_gpt_oss("<|channel|>final<|message|>42").content
        '42'
    """
    messages: list[_HarmonyMessage] = []
    at = 0
    while at < len(text):
        messages.append(_gpt_oss_message(text, at))
        at = messages[-1].end
    attempts = [m.attempt for m in messages if m.attempt is not None]
    return gathered(_gpt_oss_content(messages, has_attempts=bool(attempts)), attempts)


def _gpt_oss_content(messages: list[_HarmonyMessage], *, has_attempts: bool) -> str:
    final_texts = [m.text for m in messages if m.channel == "final" and m.text]
    if final_texts and not has_attempts:
        return "\n".join(final_texts)
    return "\n".join(m.text for m in messages if m.text)


def _gpt_oss_message(text: str, at: int) -> _HarmonyMessage:
    """The message whose header begins at a position."""
    head_end = _GPT_OSS_MESSAGE_OR_START.search(text, at)
    if head_end is None or head_end.group() == "<|start|>":
        return _gpt_oss_without_body(text, at, head_end)
    head = text[at : head_end.start()]
    channel = _GPT_OSS_CHANNEL.search(head)
    name = channel.group(1) if channel else ""
    recipient = _GPT_OSS_RECIPIENT.search(head)
    if recipient is not None and recipient.group(1) not in _GPT_OSS_NO_TOOL:
        return _gpt_oss_call(
            text, head_end.end(), name, recipient.group(1).removeprefix(_GPT_OSS_NAMESPACE)
        )
    body_end = _GPT_OSS_BODY_END.search(text, head_end.end())
    stop, end = (body_end.start(), body_end.end()) if body_end else (len(text), len(text))
    problem = (
        "a call must name its tool as to=functions.NAME" if _GPT_OSS_NAMESPACE in head else None
    )
    body = text[head_end.end() : stop]
    return _HarmonyMessage(channel=name, text=body, end=end, attempt=problem)


def _gpt_oss_without_body(text: str, at: int, start: re.Match[str] | None) -> _HarmonyMessage:
    """Text in place of a header, up to the next message or the end."""
    stop, end = (start.start(), start.end()) if start else (len(text), len(text))
    lost = text[at:stop]
    problem = "the call has no <|message|>" if f"to={_GPT_OSS_NAMESPACE}" in lost else None
    # Behind <|start|> stands the role, which belongs to the next header.
    return _HarmonyMessage(channel="", text=_GPT_OSS_MARK.sub("", lost), end=end, attempt=problem)


def _gpt_oss_call(text: str, at: int, channel: str, name: str) -> _HarmonyMessage:
    found = read_json(text, at)
    end = _GPT_OSS_CALL_END.match(text, found.end)
    problem: str
    if found.fault is not None:
        problem = f"the arguments of {quoted(name)} are not valid JSON: {found.fault}"
    elif end is None:
        problem = f"the call of {quoted(name)} must end behind its JSON object"
    else:
        attempt = call_from_parts(name, found.value)
        said = text[at : found.end] if isinstance(attempt, str) else ""
        return _HarmonyMessage(channel=channel, text=said, end=end.end(), attempt=attempt)
    body_end = _GPT_OSS_BODY_END.search(text, found.end)
    stop, after = (body_end.start(), body_end.end()) if body_end else (len(text), len(text))
    return _HarmonyMessage(channel=channel, text=text[at:stop], end=after, attempt=problem)
