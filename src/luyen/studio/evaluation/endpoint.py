"""Answers of an OpenAI-compatible chat endpoint to the prompts of an evaluation.

Each sample is one request to `/chat/completions`, with a seed that is derived from the address of
the rollout. A request that a server cannot answer now is sent again; one that it refuses is a fault
of its sample; a server that is gone, or that refuses everything, ends the evaluation.
"""

import asyncio
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast, final
from urllib.parse import urlsplit

from luyen.base.api_endpoint import SHOWN, ApiEndpoint, error_message, quoted_body, retry_after_s
from luyen.base.errors import UserError, did_you_mean
from luyen.base.http import HttpError, Response
from luyen.base.records import GroupId, Prompt, Rollout, Source, StopReason
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import Group, PromptRequest, gather_or_cancel, sampling_key

_MOST_BYTES = 64 << 20
_MODELS_TIMEOUT_S = 30.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_MOST_SEED = 2**31
_MOST_TOKENS = 2**22
"""Tokens of an answer by the count of the server, which may say anything."""
_PASSING = (408, 409, 425, 429)
"""Statuses of a request that may succeed later; so may those from 500 on."""
_OF_ALL = (401, 403, 404, 405, 415)
"""Statuses that say nothing of one prompt: no other request would be answered either."""
_STOPS = {"stop": StopReason.ANSWERED, "length": StopReason.TOKEN_BUDGET}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointOptions:
    """Which endpoint is asked, and how.

    Example:
        >>> EndpointOptions(url="http://127.0.0.1:8000/v1").concurrent
        32
    """

    url: str
    """Its address up to the version, such as `http://127.0.0.1:8000/v1`."""
    model: str | None = None
    """Name of the model; None: the only one that the endpoint has."""
    api_key_env: str | None = None
    """Environment variable that holds the key; None: no key is sent."""
    concurrent: int = 32
    """Most requests at once."""
    timeout_s: float = 600.0
    """Most seconds of one request."""
    retries: int = 3
    """How often a request is sent again."""


class _RequestFault(Exception):
    """One request got no answer, or none that is one."""

    def __init__(self, said: str, *, may_pass: bool, wait_s: float | None = None) -> None:
        super().__init__(said)
        self.may_pass = may_pass
        self.wait_s = wait_s


class _NoRoom(_RequestFault):
    """Prompt and `max_tokens` together are more than the model reads."""


class _Unreachable(_RequestFault):
    """The endpoint does not answer at all."""


@final
class ChatEndpoint:
    """One model behind a chat endpoint; `connect` makes one."""

    def __init__(self, api: ApiEndpoint, options: EndpointOptions, model: str) -> None:
        self._api = api
        self._options = options
        self.model = model

    @classmethod
    def connect(cls, options: EndpointOptions) -> "ChatEndpoint":
        """The endpoint, once it has said which models it has; a UserError if it cannot be used."""
        _refuse_address(options.url)
        api = ApiEndpoint(options.url, key=_key(options.api_key_env))
        found = asyncio.run(_models(api, options))
        return cls(api, options, _chosen(options, found))

    def generate(
        self,
        requests: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        seed: int,
        template_kwargs: Mapping[str, Any],
        finished: Callable[[], None],
    ) -> list[Group]:
        """One group for each request; `finished` is called after each sample.

        A sample without an answer is a rollout with a fault. A UserError where the endpoint is
        gone, refuses the key or does not know the model.
        """
        shared = {"model": self.model, **_sampling_fields(sampling)}
        if template_kwargs:
            shared["chat_template_kwargs"] = dict(template_kwargs)
        room = asyncio.Semaphore(self._options.concurrent)

        async def one(prompt: Prompt, group: GroupId, sample: int) -> Rollout:
            key = sampling_key(seed, "validation", group, sample)
            body = {**shared, "seed": key % _MOST_SEED, "messages": list(prompt.messages)}
            if prompt.tools:
                body["tools"] = list(prompt.tools)
            async with room:
                found = await self._rollout(body, group, sample)
            finished()
            return found

        async def every() -> list[Rollout]:
            return await gather_or_cancel(
                [one(r.prompt, r.group, i) for r in requests for i in range(r.samples)]
            )

        rollouts = iter(asyncio.run(every()))
        return [
            Group(prompt=r.prompt, rollouts=tuple(next(rollouts) for _ in range(r.samples)))
            for r in requests
        ]

    def answer(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        temperature: float,
        max_tokens: int,
        show: Callable[[str], None],
    ) -> tuple[str, int]:
        """The answer to a conversation, and its tokens; `show` gets its pieces as they come.

        A UserError where there is none, or no stream of one.
        """
        body = {
            "model": self.model,
            "messages": list(messages),
            "temperature": temperature,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        read = _AnswerStream(lambda piece: show(self._api.hidden(piece)))

        async def send() -> Response:
            async with asyncio.timeout(self._options.timeout_s):
                return await self._api.request(
                    "POST", "/chat/completions", body, most_bytes=_MOST_BYTES, take=read.take
                )

        try:
            response = asyncio.run(send())
        except TimeoutError:
            _refuse_unreachable(self._options.url, "no end of the answer in time", times=1)
        except HttpError as error:
            _refuse_unreachable(self._options.url, str(error), times=1)
        if response.status != 200:
            _refuse_status(self._options, response, self._api)
        if not read.is_whole:
            why = f"it sent no stream of an answer: {quoted_body(response.body)}"
            raise UserError("--url", self._options.url, why, "give the address of an OpenAI API")
        return self._api.hidden(read.text), read.count

    async def _rollout(self, body: Mapping[str, Any], group: GroupId, sample: int) -> Rollout:
        retry = 0
        while True:
            try:
                return _answer(await self._once(body), self._api, group, sample)
            except _NoRoom as fault:
                if "max_tokens" not in body:
                    return _failed(group, sample, f"endpoint: {fault}")
                # What fits is less than what was asked for: as here, the answer gets that.
                body = {name: value for name, value in body.items() if name != "max_tokens"}
            except _RequestFault as fault:
                retry += 1
                if fault.may_pass and retry <= self._options.retries:
                    grown = _FIRST_WAIT_S * 2.0 ** min(retry - 1, 16)
                    await asyncio.sleep(min(_LONGEST_WAIT_S, max(grown, fault.wait_s or 0.0)))
                    continue
                if isinstance(fault, _Unreachable):
                    _refuse_unreachable(self._options.url, str(fault), times=retry)
                return _failed(group, sample, f"endpoint: {fault}")

    async def _once(self, body: Mapping[str, Any]) -> Response:
        limit = self._options.timeout_s
        try:
            async with asyncio.timeout(limit):
                response = await self._api.request(
                    "POST", "/chat/completions", body, most_bytes=_MOST_BYTES
                )
        except TimeoutError as error:
            raise _RequestFault(f"no answer within {limit:g} s", may_pass=True) from error
        except HttpError as error:
            raise _Unreachable(str(error), may_pass=True) from error
        if response.status == 200:
            return response
        if response.status in _OF_ALL:
            _refuse_status(self._options, response, self._api)
        whole = self._api.hidden(error_message(response))
        said = whole[:SHOWN]
        if response.status == 400 and ("max_tokens" in whole or "context length" in whole):
            raise _NoRoom(f"status 400: {said}", may_pass=False)
        may_pass = response.status in _PASSING or response.status >= 500
        wait_s = retry_after_s(response)
        raise _RequestFault(f"status {response.status}: {said}", may_pass=may_pass, wait_s=wait_s)


@final
class _AnswerStream:
    """Server-sent events of one chat completion, put together."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show = show
        self._rest = b""
        self._pieces = 0
        self._usage: int | None = None
        self.text = ""
        self.is_whole = False
        """Whether the stream came to its end."""

    @property
    def count(self) -> int:
        """Tokens of the answer by the count of the server; its pieces where it has none."""
        return self._pieces if self._usage is None else self._usage

    def take(self, data: bytes) -> None:
        """Read a piece of the body; what is no event of a completion is left out."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            name, _, value = line.partition(b":")
            if name != b"data":
                continue
            if value.strip() == b"[DONE]":
                self.is_whole = True
                continue
            try:
                self._add(json.loads(value))
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                continue

    def _add(self, event: Any) -> None:
        usage = event.get("usage")
        if usage:
            self._usage = min(max(int(usage["completion_tokens"]), 0), _MOST_TOKENS)
        for choice in event["choices"][:1]:
            piece = choice["delta"].get("content")
            if isinstance(piece, str) and piece:
                self.text += piece
                self._pieces += 1
                self._show(piece)


def _refuse_address(url: str) -> None:
    """A UserError for what is no address, and for one with a secret: addresses are recorded."""
    fix = "write e.g. http://127.0.0.1:8000/v1"
    try:
        parts = urlsplit(url)
        has_secret = "@" in parts.netloc or bool(parts.query or parts.fragment)
        is_sound = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        has_secret, is_sound = False, False
    if has_secret:
        why = "an address holds no password and no query: it is shown and recorded"
        raise UserError("--url", "(not shown)", why, f"{fix}, and --api-key-env for a key")
    if not is_sound:
        raise UserError("--url", url, "it is no address of a server", fix)


def _key(variable: str | None) -> str | None:
    """The key in an environment variable: command lines are visible to all users."""
    if variable is None:
        return None
    found = os.environ.get(variable, "").strip()
    if not found or not found.isascii() or not found.isprintable():
        why = "the environment variable is not set, or holds no key"
        raise UserError("--api-key-env", variable, why, f"export {variable}=...")
    return found


async def _models(api: ApiEndpoint, options: EndpointOptions) -> list[str] | None:
    """Names of the models; None where the endpoint has no list of them."""
    try:
        async with asyncio.timeout(min(_MODELS_TIMEOUT_S, options.timeout_s)):
            response = await api.request("GET", "/models", most_bytes=_MOST_BYTES)
    except TimeoutError:
        _refuse_unreachable(options.url, "no answer to /models in time", times=1)
    except HttpError as error:
        _refuse_unreachable(options.url, str(error), times=1)
    if response.status in (404, 405) and options.model is not None:
        return None
    if response.status != 200:
        _refuse_status(options, response, api)
    try:
        return [str(one["id"]) for one in json.loads(response.body)["data"]]
    except (ValueError, KeyError, TypeError, RecursionError):
        why = f"its list of models is none: {quoted_body(response.body)}"
        raise UserError("--url", options.url, why, "give the address of an OpenAI API") from None


def _chosen(options: EndpointOptions, found: list[str] | None) -> str:
    if found is None:
        assert options.model is not None, "without a list there is a name"
        return options.model
    if options.model is None and len(found) == 1:
        return found[0]
    if options.model in found:
        return cast(str, options.model)
    shown = ", ".join(found[:8]) or "no model"
    why = f"the endpoint has {shown}"
    fix = "name one of them" if options.model is None else did_you_mean(options.model, found)
    raise UserError("--model", options.model, why, fix)


def _refuse_unreachable(url: str, said: str, *, times: int) -> NoReturn:
    tried = "" if times == 1 else f" ({times} times)"
    why = f"no answer from the endpoint{tried}: {said}"
    raise UserError("--url", url, why, "start the server, or correct the address")


def _refuse_status(options: EndpointOptions, response: Response, api: ApiEndpoint) -> NoReturn:
    """A UserError about an answer that every other request would get too."""
    status, said = response.status, api.hidden(error_message(response))[:SHOWN]
    if status in (401, 403):
        variable = options.api_key_env
        why = f"the endpoint refuses {'a request without a key' if variable is None else 'the key'}"
        fix = "put the key into an environment variable and name it: --api-key-env NAME"
        if variable is not None:
            fix = f"export {variable} with a key of this endpoint"
        raise UserError("--api-key-env", variable, f"{why}: status {status}: {said}", fix)
    fix = "correct the address"
    if status == 404 and not urlsplit(options.url).path.strip("/"):
        fix = f"add the version of the API: {options.url.rstrip('/')}/v1"
    raise UserError("--url", options.url, f"status {status}: {said}", fix)


def _sampling_fields(sampling: Sampling) -> dict[str, Any]:
    """The fields of a body; those that only some servers know are sent only where they act."""
    fields: dict[str, Any] = {
        "max_tokens": sampling.max_new_tokens,
        "temperature": sampling.temperature,
        "n": 1,
    }
    acting = {
        "top_p": (sampling.top_p, 1.0),
        "top_k": (sampling.top_k, -1),
        "min_p": (sampling.min_p, 0.0),
        "min_tokens": (sampling.min_new_tokens, 0),
    }
    fields |= {name: value for name, (value, neutral) in acting.items() if value != neutral}
    if sampling.stop_strings:
        fields["stop"] = list(sampling.stop_strings)
    if sampling.stop_ids:
        fields["stop_token_ids"] = sorted(sampling.stop_ids)
    return fields


def _answer(response: Response, api: ApiEndpoint, group: GroupId, sample: int) -> Rollout:
    """The answer of a reply; a fault where it is none."""
    try:
        reply: Any = json.loads(response.body)
        [choice] = reply["choices"]  # one was asked for; which of two is the answer is not known
        message: Any = choice["message"]
        text, reason = message.get("content"), choice.get("finish_reason")
        count: Any = reply["usage"]["completion_tokens"]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        said = f"it sent no chat completion: {quoted_body(response.body)}"
        raise _RequestFault(said, may_pass=False) from None
    if message.get("tool_calls"):
        said = "it read tool calls out of the answer, whose text is not sent then"
        raise _RequestFault(said, may_pass=False)
    if message.get("refusal"):
        said = f"it refused: {str(message['refusal'])[:200]!r}"
        raise _RequestFault(said, may_pass=False)
    if isinstance(text, str) and any("\ud800" <= c <= "\udfff" for c in text):
        raise _RequestFault("its text holds half of a surrogate pair", may_pass=False)
    if type(count) is not int or not 0 <= count <= _MOST_TOKENS:
        raise _RequestFault(f"it counts {str(count)[:40]!r} tokens", may_pass=False)
    if (
        not isinstance(reason, str | None)
        or reason not in _STOPS
        or not isinstance(text, str | None)
    ):
        raise _RequestFault(f"it ended an answer by {str(reason)[:40]!r}", may_pass=False)
    return Rollout(
        group=group,
        sample=sample,
        # An endpoint says how many tokens it sampled, and not which: rewards of length read that.
        tokens=(0,) * count,
        sources=(Source.SAMPLED,) * count,
        turns=(0,) * count,
        logps=(None,) * count,
        versions=(None,) * count,
        stop=_STOPS[reason],
        text=api.hidden(text or ""),
    )


def _failed(group: GroupId, sample: int, fault: str) -> Rollout:
    return Rollout(
        group=group,
        sample=sample,
        tokens=(),
        sources=(),
        turns=(),
        logps=(),
        versions=(),
        stop=StopReason.FAULT,
        text="",
        fault=fault,
    )
