"""Calls as engine requests: prompts as tokens, a random key and room for each answer."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.seeds import derive_key
from luyen.rollout.protocol import Request
from luyen.serve.calls import ChatCall, CompletionCall, DecodingOptions, ReplyOptions, tool_function
from luyen.serve.failures import ApiFailure, wrong
from luyen.serve.model import ServedModel

_CHAT, _COMPLETION = "chat.completion", "text_completion"
MESSAGE_KEYS = frozenset(
    {"role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "thinking"}
)
"""Keys of messages that templates may read."""
_REPLY_KEYS = frozenset({"refusal", "annotations", "audio", "function_call", "reasoning"})
"""Keys of replies, which clients send back with their messages; they are left out."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What the engine does for one call.

    Example:
        >>> call = CompletionCall(prompts=((5, 6),))
        >>> Job(id="cmpl-1", call=call, prompts=((5, 6),), requests=(), created=0).object
        'text_completion'
    """

    id: str
    """Id of the reply; those of its engine requests begin with it."""
    call: CompletionCall | ChatCall
    """The call."""
    prompts: tuple[tuple[int, ...], ...]
    """Tokens of each prompt."""
    requests: tuple[Request, ...]
    """One engine request for each prompt; none where nothing is to be generated."""
    created: int
    """Unix time."""

    @property
    def object(self) -> str:
        """What the reply says it is."""
        return _CHAT if isinstance(self.call, ChatCall) else _COMPLETION

    @property
    def decoding(self) -> DecodingOptions:
        """Sampling of its answers."""
        return self.call.decoding

    @property
    def reply(self) -> ReplyOptions:
        """Form of its answers."""
        return self.call.reply

    @property
    def sequences(self) -> int:
        """Answers that the engine generates."""
        return sum(len(request.keys) for request in self.requests)

    def choice(self, request: str, sample: int) -> int:
        """Index of the choice that a sample of a request is."""
        return int(request.rpartition("/")[2]) * self.decoding.n + sample


def completion_job(call: CompletionCall, model: ServedModel, *, id: str, seed: int, at: int) -> Job:
    """The job of a completion; a UserError where it does not fit the model."""
    prompts = tuple(
        _encoded(prompt, model, "prompt" if len(call.prompts) == 1 else f"prompt[{i}]")
        if isinstance(prompt, str)
        else prompt
        for i, prompt in enumerate(call.prompts)
    )
    return _job(call, prompts, model, id=id, seed=seed, at=at)


def chat_job(call: ChatCall, model: ServedModel, *, id: str, seed: int, at: int) -> Job:
    """The job of a chat; a UserError where it does not fit the model."""
    if not model.tokenizer.has_template:
        why = "the model has no chat template"
        raise wrong("messages", len(call.messages), why, "use /v1/completions")
    messages = [_plain_message(m, f"messages[{i}]") for i, m in enumerate(call.messages)]
    tools = call.tools if call.tool_choice.mode != "none" else ()
    try:
        least = model.renderer.least_tokens(messages, tools, is_prompt=True)
        _refuse_long(least, model, "messages")
        tokens = tuple(model.renderer.prompt_tokens(messages, tools))
    except UserError as error:
        # Its own field would name a file of this machine.
        raise wrong("messages", len(messages), error.why, "send other messages") from None
    return _job(call, (tokens,), model, id=id, seed=seed, at=at)


def _job(
    call: CompletionCall | ChatCall,
    prompts: tuple[tuple[int, ...], ...],
    model: ServedModel,
    *,
    id: str,
    seed: int,
    at: int,
) -> Job:
    decoding = call.decoding
    keys = tuple(derive_key(seed, "serve", sample) for sample in range(decoding.n))
    requests: list[Request] = []
    for i, tokens in enumerate(prompts):
        room = _room(len(tokens), decoding, model)
        if room == 0:
            continue
        sampling = decoding.sampling(max_new_tokens=room, ends=model.ends)
        requests.append(Request(id=f"{id}/{i}", tokens=tokens, keys=keys, sampling=sampling))
    return Job(id=id, call=call, prompts=prompts, requests=tuple(requests), created=at)


def _room(prompt: int, decoding: DecodingOptions, model: ServedModel) -> int:
    """Tokens of an answer to a prompt of this length."""
    limit, most = model.max_model_len, decoding.max_tokens
    if prompt + (1 if most is None else most) > limit:
        wanted = "" if most is None else f" and max_tokens is {most}"
        message = (
            f"the prompt has {prompt} tokens{wanted}; the model reads {limit} tokens of prompt and "
            "answer together. Fix: shorten the prompt, or lower max_tokens"
        )
        field = "max_tokens" if most is not None and prompt < limit else "prompt"
        raise ApiFailure(400, message, param=field, code="context_length_exceeded")
    return limit - prompt if most is None else most


def _encoded(text: str, model: ServedModel, name: str) -> tuple[int, ...]:
    _refuse_long(model.tokenizer.least_tokens(text), model, name)
    tokens = tuple(model.tokenizer.encode(text))
    if not tokens:
        raise wrong(name, text, "the tokenizer makes no token of it", "send some text")
    return tokens


def _refuse_long(least: int, model: ServedModel, name: str) -> None:
    """Refuse a text that is too long before it is tokenised."""
    if least > model.max_model_len:
        message = (
            f"{name}: it has at least {least} tokens, and the model reads {model.max_model_len}. "
            "Fix: shorten it"
        )
        raise ApiFailure(400, message, param=name, code="context_length_exceeded")


def _plain_message(message: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """A message with the keys that templates read; a UserError for any other."""
    odd = [key for key in message if key not in MESSAGE_KEYS | _REPLY_KEYS]
    if odd:
        raise wrong(f"{name}.{odd[0]}", message[odd[0]], "no such field of a message", "drop it")
    for key in ("name", "tool_call_id", "reasoning_content", "thinking"):
        if not isinstance(message.get(key, ""), str):
            raise wrong(f"{name}.{key}", message[key], "it is text", "send a string")
    return {key: value for key, value in message.items() if key in MESSAGE_KEYS}


def call_schema(call: ChatCall) -> dict[str, Any] | None:
    """JSON schema of the calls that an answer must consist of; None: it is free text.

    A named tool leaves the arguments alone to be written; a required call is an object, or a list
    of objects, with name and arguments.
    """
    choice = call.tool_choice
    if choice.mode not in ("named", "required"):
        return None
    functions = {tool_function(tool)["name"]: tool_function(tool) for tool in call.tools}
    if choice.mode == "named":
        return _parameters(functions[choice.name])
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": name}, "arguments": _parameters(function)},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name, function in functions.items()
    ]
    items: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    most = {} if choice.is_parallel else {"maxItems": 1}
    return {"type": "array", "items": items, "minItems": 1, **most}


def _parameters(function: Mapping[str, Any]) -> dict[str, Any]:
    found = function.get("parameters")
    return {"type": "object", **found} if isinstance(found, dict) else {"type": "object"}


def schema_text(schema: Mapping[str, Any]) -> str:
    """A schema as it is compared and cached."""
    return json.dumps(schema, sort_keys=True)
