"""Bodies of /v1/completions and /v1/chat/completions as records; what is odd is refused by name.

Three kinds of fields: those that act; those of OpenAI that change nothing here and are accepted
(`IGNORED`); and those that are accepted at the value that changes nothing, since nothing stands
behind them. Every other field is an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, cast, final

from luyen.base.records import Message
from luyen.data.messages import check_conversation, check_tools
from luyen.rollout.protocol import Sampling
from luyen.serve.failures import wrong
from luyen.serve.fields import (
    Read,
    flag,
    listed,
    number,
    object_of,
    one_of,
    only,
    read_fields,
    text,
    token_ids,
    whole,
)

IGNORED = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "reasoning_effort",
        "verbosity",
    }
)
"""Fields of OpenAI that are accepted and have no effect."""
_MOST_N = 128
_MOST_TOP = 20
_MOST_STOPS, _LONGEST_STOP = 16, 256
_NO_PENALTY = "the engine samples from the model's own distribution"
PromptInput: TypeAlias = str | tuple[int, ...]
"""Text, or token ids."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BodyLimits:
    """Bounds of what a request may hold.

    Example:
        >>> BodyLimits(vocabulary=128, max_model_len=512).most_prompts
        1024
    """

    vocabulary: int
    """Token ids of the tokenizer."""
    max_model_len: int
    """Most tokens of prompt and answer."""
    most_prompts: int = 1024
    """Most prompts of a request."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DecodingOptions:
    """How answers are sampled, and when they end.

    Example:
        >>> DecodingOptions(temperature=0.0).sampling(max_new_tokens=8, ends=frozenset()).is_greedy
        True
    """

    n: int = 1
    """Answers of each prompt."""
    max_tokens: int | None = None
    """Most tokens of an answer; None: not said."""
    min_tokens: int = 0
    """Tokens before which no stop ends an answer."""
    temperature: float = 1.0
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Sample from the likeliest tokens of this total probability."""
    top_k: int = -1
    """Sample from the k likeliest tokens; -1 or 0: from all."""
    min_p: float = 0.0
    """Sample from tokens at least this likely, relative to the likeliest."""
    stop: tuple[str, ...] = ()
    """Texts that end an answer, and are not part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """More tokens that end an answer."""
    ignore_eos: bool = False
    """Whether answers always have `max_tokens` tokens."""
    seed: int | None = None
    """Equal seeds and prompts give equal answers; None: an unpredictable one."""
    top_logprobs: int | None = None
    """Likeliest tokens named at each place; None: no log-probabilities at all."""

    def sampling(self, *, max_new_tokens: int, ends: frozenset[int]) -> Sampling:
        """The sampling parameters of the engine; `ends` are the model's own stop tokens."""
        return Sampling(
            max_new_tokens=max_new_tokens,
            min_new_tokens=min(self.min_tokens, max_new_tokens),
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            stop_ids=ends | {*self.stop_token_ids},
            stop_strings=self.stop,
            ignore_stop=self.ignore_eos,
            top_logprobs=self.top_logprobs or 0,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOptions:
    """How answers are written.

    Example:
        >>> ReplyOptions(stream=True).include_usage
        False
    """

    stream: bool = False
    """Whether pieces are sent as they come."""
    include_usage: bool = False
    """Whether a stream ends with the counts of tokens."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    return_token_ids: bool = False
    """Whether the ids of prompt and answer are sent too."""
    tokens_as_ids: bool = False
    """Whether log-probabilities name tokens `token_id:N` instead of by their text."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionCall:
    """A request to continue texts.

    Example:
        >>> CompletionCall(prompts=("1+2=",)).decoding.n
        1
    """

    prompts: tuple[PromptInput, ...]
    """What is continued."""
    model: str | None = None
    """Name of the model; None: whichever is here."""
    decoding: DecodingOptions = DecodingOptions()
    """Sampling."""
    reply: ReplyOptions = ReplyOptions()
    """Form of the answer."""
    echo: bool = False
    """Whether the prompt stands before the answer, with its log-probabilities."""


ChoiceMode: TypeAlias = Literal["none", "auto", "required", "named"]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ToolChoice:
    """Whether the model may, must or must not call tools.

    Example:
        >>> ToolChoice(mode="named", name="add").name
        'add'
    """

    mode: ChoiceMode = "none"
    """`named`: it must call one tool."""
    name: str | None = None
    """That tool."""
    is_parallel: bool = True
    """Whether an answer may hold several calls."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseFormat:
    """What answers look like.

    Example:
        >>> ResponseFormat(kind="json_object").schema is None
        True
    """

    kind: Literal["text", "json_object", "json_schema"] = "text"
    """Any text, any JSON object, or JSON that fits the schema."""
    schema: Mapping[str, Any] | None = None
    """The schema."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """A request to answer a conversation.

    Example:
        >>> ChatCall(messages=({"role": "user", "content": "hi"},)).tool_choice.mode
        'none'
    """

    messages: tuple[Message, ...]
    """The conversation so far."""
    model: str | None = None
    """Name of the model; None: whichever is here."""
    tools: tuple[Mapping[str, Any], ...] = ()
    """Schemas of the tools on offer."""
    tool_choice: ToolChoice = ToolChoice()
    """Whether they are called."""
    response_format: ResponseFormat = ResponseFormat()
    """Form of the text."""
    decoding: DecodingOptions = DecodingOptions()
    """Sampling."""
    reply: ReplyOptions = ReplyOptions()
    """Form of the answer."""


def read_completion(body: Mapping[str, Any], limits: BodyLimits) -> CompletionCall:
    """The call that a body of /v1/completions is."""
    readers: dict[str, Read[Any]] = {
        **_common(limits),
        "prompt": _prompts(limits),
        "logprobs": whole(0, _MOST_TOP),
        "echo": flag,
        "best_of": whole(1, _MOST_N),
        "suffix": only("", why="text is generated at the end of the prompt alone"),
    }
    found = read_fields(body, readers, ignored=IGNORED)
    if "prompt" not in found:
        raise wrong("prompt", None, "it is what the answer continues", "send text or token ids")
    if found.get("best_of", 1) not in (1, found.get("n", 1)):
        why = "all of the `n` answers are returned, and no more are sampled"
        raise wrong("best_of", found["best_of"], why, "leave it out")
    if found.get("echo") and found.get("stream"):
        raise wrong("echo", True, "a stream holds the answer alone", "leave echo or stream out")
    least = 0 if found.get("echo") else 1
    return CompletionCall(
        prompts=found["prompt"],
        model=found.get("model"),
        decoding=_decoding(found, top=found.get("logprobs"), least=least, default=16),
        reply=_reply(found),
        echo=found.get("echo", False),
    )


def read_chat(body: Mapping[str, Any], limits: BodyLimits) -> ChatCall:
    """The call that a body of /v1/chat/completions is."""
    readers: dict[str, Read[Any]] = {
        **_common(limits),
        "messages": lambda value, name: tuple(check_conversation(value, name, wrong)),
        "tools": lambda value, _: tuple(check_tools(value, wrong)),
        "tool_choice": _tool_choice,
        "parallel_tool_calls": flag,
        "response_format": _response_format,
        "max_completion_tokens": whole(1, limits.max_model_len),
        "logprobs": flag,
        "top_logprobs": whole(0, _MOST_TOP),
        "modalities": only(["text"], why="answers are text"),
    }
    found = read_fields(body, readers, ignored=IGNORED)
    if "messages" not in found:
        fix = 'send [{"role": "user", "content": ...}]'
        raise wrong("messages", None, "they are what is answered", fix)
    if found.get("top_logprobs") is not None and not found.get("logprobs"):
        why = "it takes log-probabilities, which `logprobs` turns on"
        raise wrong("top_logprobs", found["top_logprobs"], why, "send logprobs: true")
    most = [found[name] for name in ("max_tokens", "max_completion_tokens") if name in found]
    if len(set(most)) > 1:
        why = f"max_tokens says {most[0]}, and both mean the same"
        raise wrong("max_completion_tokens", most[1], why, "send one of them")
    found |= {"max_tokens": most[0]} if most else {}
    return ChatCall(
        messages=found["messages"],
        model=found.get("model"),
        tools=found.get("tools", ()),
        tool_choice=_checked_choice(found),
        response_format=found.get("response_format", ResponseFormat()),
        decoding=_decoding(
            found, top=found.get("top_logprobs", 0) if found.get("logprobs") else None, least=1
        ),
        reply=_reply(found),
    )


def _common(limits: BodyLimits) -> dict[str, Read[Any]]:
    """Readers of the fields that both endpoints have."""
    return {
        "model": text,
        "n": whole(1, _MOST_N),
        "max_tokens": whole(0, limits.max_model_len),
        "min_tokens": whole(0, limits.max_model_len),
        "temperature": number(0.0, 2.0),
        "top_p": number(0.0, 1.0, is_open=True),
        "top_k": whole(-1, 2**31),
        "min_p": number(0.0, 1.0),
        "stop": _stop,
        "stop_token_ids": listed(whole(0, limits.vocabulary - 1), most=32),
        "ignore_eos": flag,
        "seed": whole(-(2**63), 2**63 - 1),
        "stream": flag,
        "stream_options": _stream_options,
        "skip_special_tokens": flag,
        "return_token_ids": flag,
        "return_tokens_as_token_ids": flag,
        "frequency_penalty": only(0, 0.0, why=_NO_PENALTY),
        "presence_penalty": only(0, 0.0, why=_NO_PENALTY),
        "repetition_penalty": only(1, 1.0, why=_NO_PENALTY),
        "logit_bias": only({}, why=_NO_PENALTY),
    }


def _decoding(
    found: Mapping[str, Any], *, top: int | None, least: int, default: int | None = None
) -> DecodingOptions:
    most = found.get("max_tokens", default)
    if most is not None and most < least:
        raise wrong("max_tokens", most, "an answer has at least one token", "send 1 or more")
    names = ("n", "min_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "ignore_eos")
    given = {name: found[name] for name in (*names, "stop_token_ids", "seed") if name in found}
    if most is not None and given.get("min_tokens", 0) > most:
        why = f"an answer has at most {most} tokens (max_tokens)"
        raise wrong("min_tokens", given["min_tokens"], why, "lower it")
    return DecodingOptions(max_tokens=most, top_logprobs=top, **given)


def _reply(found: Mapping[str, Any]) -> ReplyOptions:
    is_stream = found.get("stream", False)
    if "stream_options" in found and not is_stream:
        raise wrong(
            "stream_options", {}, "there is no stream", "send stream: true, or leave it out"
        )
    return ReplyOptions(
        stream=is_stream,
        include_usage=found.get("stream_options", False),
        skip_special_tokens=found.get("skip_special_tokens", True),
        return_token_ids=found.get("return_token_ids", False),
        tokens_as_ids=found.get("return_tokens_as_token_ids", False),
    )


def _prompts(limits: BodyLimits) -> Read[tuple[PromptInput, ...]]:
    """Text, ids, or a list of either."""
    ids = token_ids(limits.vocabulary, most=limits.max_model_len)

    def one(value: Any, name: str) -> PromptInput:
        found = value if isinstance(value, str) else ids(value, name)
        if not found:
            raise wrong(name, value, "a prompt has at least one token", "send some text")
        return found

    def read(value: Any, name: str) -> tuple[PromptInput, ...]:
        if isinstance(value, str):
            return (one(value, name),)
        if isinstance(value, list) and value and isinstance(value[0], list | str):
            return listed(one, least=1, most=limits.most_prompts)(value, name)
        return (ids(value, name),)

    return read


def _stop(value: Any, name: str) -> tuple[str, ...]:
    found = (value,) if isinstance(value, str) else listed(text, most=_MOST_STOPS)(value, name)
    for one in found:
        if not 1 <= len(one) <= _LONGEST_STOP:
            why = f"a stop is a text of 1 to {_LONGEST_STOP} characters"
            raise wrong(name, one, why, "send such texts")
    return found


def _stream_options(value: Any, name: str) -> bool:
    """Whether a stream ends with the counts of tokens."""
    readers: dict[str, Read[Any]] = {"include_usage": flag, "include_obfuscation": flag}
    return read_fields(object_of(value, name), readers, above=f"{name}.").get(
        "include_usage", False
    )


def _tool_choice(value: Any, name: str) -> ToolChoice:
    if isinstance(value, str):
        mode = one_of("none", "auto", "required")(value, name)
        return ToolChoice(mode=cast(ChoiceMode, mode))
    readers: dict[str, Read[Any]] = {"type": one_of("function"), "function": object_of}
    found = read_fields(object_of(value, name), readers, above=f"{name}.")
    inner: dict[str, Read[Any]] = {"name": text}
    named = read_fields(found.get("function", {}), inner, above=f"{name}.function.")
    if "name" not in named:
        why, fix = "it names a tool", 'send {"type": "function", "function": {"name": ...}}'
        raise wrong(f"{name}.function.name", None, why, fix)
    return ToolChoice(mode="named", name=named["name"])


def _checked_choice(found: Mapping[str, Any]) -> ToolChoice:
    """The tool choice, which must fit the tools."""
    names = [tool_function(tool)["name"] for tool in found.get("tools", ())]
    choice: ToolChoice = found.get("tool_choice", ToolChoice(mode="auto" if names else "none"))
    if len(set(names)) < len(names):
        raise wrong("tools", names, "two tools have one name", "give each its own")
    if not names and choice.mode == "auto":
        choice = ToolChoice(mode="none")
    if not names and choice.mode != "none":
        raise wrong("tool_choice", choice.name or choice.mode, "there are no tools", "send tools")
    if choice.mode == "named" and choice.name not in names:
        why = "no tool has this name"
        raise wrong("tool_choice.function.name", choice.name, why, "name one of the tools")
    answer: ResponseFormat = found.get("response_format", ResponseFormat())
    if choice.mode != "none" and answer.kind != "text":
        why = "an answer is either a call of a tool or JSON of this form"
        raise wrong("response_format", answer.kind, why, "leave it out, or send tool_choice: none")
    is_parallel = found.get("parallel_tool_calls", True)
    return ToolChoice(mode=choice.mode, name=choice.name, is_parallel=is_parallel)


def tool_function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function of a tool's schema, with or without the object around it."""
    return cast(Mapping[str, Any], tool.get("function", tool))


def _response_format(value: Any, name: str) -> ResponseFormat:
    readers: dict[str, Read[Any]] = {
        "type": one_of("text", "json_object", "json_schema"),
        "json_schema": object_of,
    }
    found = read_fields(object_of(value, name), readers, above=f"{name}.")
    if "type" not in found:
        raise wrong(f"{name}.type", None, "it says which form", "send text or json_object")
    if found["type"] != "json_schema":
        return ResponseFormat(kind=found["type"])
    inner: dict[str, Read[Any]] = {
        "name": text,
        "description": text,
        "strict": flag,
        "schema": object_of,
    }
    schema = read_fields(found.get("json_schema", {}), inner, above=f"{name}.json_schema.")
    if "schema" not in schema:
        raise wrong(f"{name}.json_schema.schema", None, "answers fit a schema", "send one")
    return ResponseFormat(kind="json_schema", schema=schema["schema"])
