"""Calls as engine requests: prompts as tokens, a random key and room for each answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.seeds import derive_key
from luyen.rollout.constraints import (
    call_constraint,
    json_object_constraint,
    json_schema_constraint,
)
from luyen.rollout.protocol import Request, TokenConstraint
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

    @property
    def scores_prompts(self) -> bool:
        """Whether the log-probabilities of its prompts are wanted."""
        call = self.call
        has_echo = isinstance(call, CompletionCall) and call.echo
        return has_echo and self.decoding.top_logprobs is not None

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
    constraint = constraint_of(call, model)
    if constraint is not None:
        _refuse_free_end(call.decoding)
    return _job(call, (tokens,), model, id=id, seed=seed, at=at, constraint=constraint)


def _refuse_free_end(decoding: DecodingOptions) -> None:
    """An answer that must have a form ends where the form does."""
    fields = {"ignore_eos": decoding.ignore_eos, "min_tokens": decoding.min_tokens}
    for name, value in fields.items():
        if value:
            raise wrong(name, value, "the form of the answer decides where it ends", "leave it out")


def _job(
    call: CompletionCall | ChatCall,
    prompts: tuple[tuple[int, ...], ...],
    model: ServedModel,
    *,
    id: str,
    seed: int,
    at: int,
    constraint: TokenConstraint | None = None,
) -> Job:
    decoding = call.decoding
    keys = tuple(derive_key(seed, "serve", sample) for sample in range(decoding.n))
    requests: list[Request] = []
    for i, tokens in enumerate(prompts):
        field = "messages" if isinstance(call, ChatCall) else "prompt"
        room = _room(len(tokens), decoding, model, field)
        if room == 0:
            continue
        sampling = decoding.sampling(max_new_tokens=room, ends=model.ends)
        requests.append(
            Request(
                id=f"{id}/{i}", tokens=tokens, keys=keys, sampling=sampling, constraint=constraint
            )
        )
    return Job(id=id, call=call, prompts=prompts, requests=tuple(requests), created=at)


def _room(prompt: int, decoding: DecodingOptions, model: ServedModel, field: str) -> int:
    """Tokens of an answer to a prompt of this length."""
    limit, most = model.max_model_len, decoding.max_tokens
    if prompt + (1 if most is None else most) > limit:
        wanted = "" if most is None else f" and max_tokens is {most}"
        message = (
            f"the prompt has {prompt} tokens{wanted}; the model reads {limit} tokens of prompt and "
            "answer together. Fix: shorten the prompt, or lower max_tokens"
        )
        field = "max_tokens" if most is not None and prompt < limit else field
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


def constraint_of(call: ChatCall, model: ServedModel) -> TokenConstraint | None:
    """What an answer must be: a call of a tool, JSON, or None for any text."""
    choice, answer = call.tool_choice, call.response_format
    if choice.mode in ("required", "named"):
        names = [tool_function(tool)["name"] for tool in call.tools]
        pairs = zip(call.tools, names, strict=True)
        tools = [tool for tool, name in pairs if choice.mode == "required" or name == choice.name]
        return call_constraint(tools, model.tool_format, model.tokenizer)
    if answer.kind == "json_schema":
        assert answer.schema is not None, "it was read with a schema"
        field = "response_format.json_schema.schema"
        return json_schema_constraint(answer.schema, model.tokenizer, field=field)
    return json_object_constraint(model.tokenizer) if answer.kind == "json_object" else None
