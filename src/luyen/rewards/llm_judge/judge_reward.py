"""An LLM judge as a reward: it is prompted about every answer, within shared rate limits."""

import asyncio
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from time import monotonic, perf_counter
from typing import Any, cast, final
from weakref import WeakKeyDictionary

from luyen.base.api_endpoint import SHOWN, ApiEndpoint, error_message, quoted_body, retry_after_s
from luyen.base.boundary import boundary, last_line, plain_text
from luyen.base.errors import UserError
from luyen.base.heartbeat import beat
from luyen.base.http import HttpError
from luyen.base.records import Message, Prompt, Rollout, Score
from luyen.base.secrets import masked_urls
from luyen.config.reward_components import judge_api_key
from luyen.config.schema.reward import ENGINE as OWN_ENGINE
from luyen.config.schema.reward import JudgeConfig
from luyen.rewards.cache import ScoreCache, content_hash
from luyen.rewards.calls import Executor, ScoreCall, ScoringCounters, add_time
from luyen.rewards.llm_judge import parser
from luyen.rewards.llm_judge.faults import (
    CONNECTION,
    CUT_OFF,
    EMPTY,
    ENGINE,
    NOT_FINITE,
    NOT_JSON,
    SHAPE,
    TIMEOUT,
    TOO_LONG,
    UNPARSABLE,
    JudgeFault,
    quoted_end,
)
from luyen.rewards.protocol import Ask

# The OpenAI-compatible endpoint of a judge: messages go in, the text of the reply comes out.

MOST_BYTES = 2**20
"""Most bytes of a body; a reply is far shorter."""


@final
class Endpoint:
    """One model of one server; a call sends one request. The caller waits and retries."""

    def __init__(self, base_url: str, *, api_key_env: str | None) -> None:
        """A UserError when the environment does not hold the key."""
        key = None if api_key_env is None else judge_api_key(api_key_env)
        self._api = ApiEndpoint(base_url, key=key)

    async def __call__(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> str:
        """The text of the reply; a JudgeFault when there is none. Neither holds the key."""
        payload = {"messages": [dict(message) for message in messages], **settings}
        api = self._api
        try:
            response = await api.request(
                "POST", "/chat/completions", payload, most_bytes=MOST_BYTES
            )
        except HttpError as error:
            kind = TOO_LONG if error.kind == "too_long" else CONNECTION
            raise JudgeFault(kind, str(error)) from error
        if response.status != 200:
            kind, said = f"http_{response.status}", api.hidden(error_message(response))
            raise JudgeFault(kind, said[:SHOWN], retry_after_s=retry_after_s(response))
        return api.hidden(reply_in(response.body))


def reply_in(body: bytes) -> str:
    """The text of the first choice of a chat completion, if it was said to its end.

    Example:
        >>> reply_in(b'{"choices": [{"message": {"content": "Score: 7"}}]}')
        'Score: 7'
    """
    try:
        found: Any = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise JudgeFault(NOT_JSON, f"the body is {quoted_body(body)}") from error
    try:
        choice = found["choices"][0]
        text = choice["message"].get("content")
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise JudgeFault(SHAPE, f"no choices[0].message in {quoted_body(body)}") from error
    if cast(dict[str, Any], choice).get("finish_reason") == "length":
        raise JudgeFault(CUT_OFF, f"max_tokens ended the reply: {quoted_end(str(text or ''))}")
    if text is not None and not isinstance(text, str):
        raise JudgeFault(SHAPE, f"the content is no text in {quoted_body(body)}")
    if not text or not text.strip():
        raise JudgeFault(EMPTY, "the reply is empty")
    return text


# The judge prompt.

_HOLE = re.compile(r"\{(question|answer|ground_truth)\}")


def messages_for(judge: JudgeConfig, prompt: Prompt, answer: str) -> list[Message]:
    """Messages for the judge. Placeholders are filled once; text from an answer is never expanded.

    Example:
        >>> from luyen.base.records import make_prompt
        >>> judge = JudgeConfig(base_url="http://localhost:1/v1", prompt="{question} -> {answer}?")
        >>> prompt = make_prompt([{"role": "user", "content": "1+1"}])
        >>> messages_for(judge, prompt, "{question}")[0]["content"]
        '1+1 -> {question}?'
    """
    truth = prompt.ground_truth
    said = {
        "question": question_of(prompt),
        "answer": answer,
        "ground_truth": "" if truth is None else str(truth),
    }
    text = _HOLE.sub(lambda hole: said[hole[1]], judge.prompt)
    system = [] if judge.system is None else [{"role": "system", "content": judge.system}]
    return [*system, {"role": "user", "content": text}]


def question_of(prompt: Prompt) -> str:
    """The one message of a prompt, or all of them, each with the role that spoke."""
    turns = [(str(m.get("role", "")), _words(m.get("content"))) for m in prompt.messages]
    if len(turns) == 1:
        return turns[0][1]
    return "\n\n".join(f"{role}: {words}" for role, words in turns)


def _words(content: Any) -> str:
    if isinstance(content, list | tuple):
        parts = cast(Sequence[Any], content)
        texts = [cast(Mapping[str, Any], p).get("text") for p in parts if isinstance(p, Mapping)]
        return "\n".join(str(text) for text in texts if text is not None)
    return "" if content is None else str(content)


# Rate and concurrency limits, shared by all groups of a step.

FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 30.0


def wait_before(retry: int, retry_after_s: float | None = None) -> float:
    """Seconds to wait before the n-th retry: twice as long each time, or what the server asks for.

    Example:
        >>> [wait_before(n) for n in (1, 2, 3, 10)]
        [0.5, 1.0, 2.0, 30.0]
        >>> wait_before(1, retry_after_s=7.0)
        7.0
    """
    grown = FIRST_WAIT_S * 2.0 ** min(retry - 1, 32)
    return min(LONGEST_WAIT_S, grown if retry_after_s is None else max(grown, retry_after_s))


@final
class RateLimit:
    """At most so many starts a minute, evenly spaced, so that no minute anywhere holds more.

    Example:
        >>> pace = RateLimit(per_minute=30, now=lambda: 0.0)
        >>> pace.reserve(), pace.reserve(), pace.reserve()
        (0.0, 2.0, 4.0)
    """

    def __init__(self, *, per_minute: float | None, now: Callable[[], float] = monotonic) -> None:
        """`None`: no limit, but `pause` holds all the same."""
        self._apart_s = 0.0 if per_minute is None else 60.0 / per_minute
        self._now = now
        self._lock = threading.Lock()
        self._free_at = now()

    def reserve(self) -> float:
        """Take the next place; how many seconds from now it comes."""
        with self._lock:
            now = self._now()
            at = max(now, self._free_at)
            self._free_at = at + self._apart_s
            return at - now

    def pause(self, seconds: float) -> None:
        """Start no request for so many seconds, as the server demanded (`Retry-After`)."""
        with self._lock:
            self._free_at = max(self._free_at, self._now() + seconds)


@final
class ConcurrencyLimit:
    """At most so many at once. Every step has an event loop of its own, and one semaphore on it."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = (
            WeakKeyDictionary()
        )

    def here(self) -> asyncio.Semaphore:
        """The semaphore of the running loop."""
        loop = asyncio.get_running_loop()
        return self._semaphores.setdefault(loop, asyncio.Semaphore(self._size))


NAME = "judge"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SharedEndpoint:
    """A way to ask, with the limits that everybody who uses it shares.

    Example:
        >>> pace, room = RateLimit(per_minute=None), ConcurrencyLimit(4)
        >>> SharedEndpoint(ask=None, pace=pace, room=room).pace.reserve()
        0.0
    """

    ask: Ask
    """Puts a conversation to the model."""
    pace: RateLimit
    """How often."""
    room: ConcurrencyLimit
    """How many at once."""


@final
class JudgeFactory:
    """Makes judges. Those that ask the same endpoint share its limits and the cache.

    What the engine of the run says is never cached.
    """

    def __init__(
        self,
        *,
        own: Ask | None,
        executor: Executor,
        cache: ScoreCache | None,
        counts: ScoringCounters,
    ) -> None:
        """`own` asks the engine of the run; `executor` runs patterns, which could hang."""
        self._own = own
        self._executor = executor
        self._cache = cache
        self._counts = counts
        self._lines: dict[tuple[Any, ...], SharedEndpoint] = {}

    def judge(self, judge: JudgeConfig) -> "JudgeReward":
        """The judge of a block; a UserError when it cannot be asked here."""
        limits = judge.concurrency, judge.requests_per_minute
        place = (judge.base_url, judge.api_key_env, *limits)
        if place not in self._lines:
            self._lines[place] = SharedEndpoint(
                ask=self._ask(judge),
                pace=RateLimit(per_minute=judge.requests_per_minute),
                room=ConcurrencyLimit(judge.concurrency),
            )
        # The policy learns: tomorrow it would answer otherwise, under the same key.
        cache = None if judge.base_url == OWN_ENGINE else self._cache
        line, counts = self._lines[place], self._counts
        return JudgeReward(judge, line, executor=self._executor, cache=cache, counts=counts)

    def _ask(self, judge: JudgeConfig) -> Ask:
        if judge.base_url != OWN_ENGINE:
            return Endpoint(judge.base_url, api_key_env=judge.api_key_env)
        if self._own is None:
            why = "there is no rollout engine here that a judge could ask"
            raise UserError("judge.base_url", OWN_ENGINE, why, "name an OpenAI-compatible endpoint")
        return self._own


@final
class JudgeReward:
    """Judges every rollout by what a model says about it."""

    def __init__(
        self,
        judge: JudgeConfig,
        line: SharedEndpoint,
        *,
        executor: Executor,
        cache: ScoreCache | None,
        counts: ScoringCounters,
        sleep: Callable[[float], Any] = asyncio.sleep,
    ) -> None:
        self._judge = judge
        self._line = line
        self._executor = executor
        self._cache = cache
        self._counts = counts
        self._sleep = sleep
        self._settings = {
            "model": judge.model,
            "temperature": judge.temperature,
            "max_tokens": judge.max_tokens,
        }

    @property
    def names(self) -> tuple[str, ...]:
        """`judge`."""
        return (NAME,)

    async def __call__(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Score]:
        """One score per rollout; an error with the name of the fault where there is none."""
        return await asyncio.gather(*(self._one(prompt, rollout) for rollout in rollouts))

    async def _one(self, prompt: Prompt, rollout: Rollout) -> Score:
        start = perf_counter()
        try:
            messages = messages_for(self._judge, prompt, rollout.text)
            reply, value = await self._value(messages, rollout.text)
            score = Score(name=NAME, value=value, reply=plain_text(reply))
        except JudgeFault as fault:
            self._counts.add(f"judging/faults/{fault.kind}")
            said = None if fault.reply is None else plain_text(fault.reply)
            score = Score(name=NAME, value=None, error=str(fault), reply=said)
        seconds = perf_counter() - start
        add_time(rollout, seconds)
        return replace(score, seconds=seconds)

    async def _value(self, messages: list[Message], answer: str) -> tuple[str, float]:
        """Reply and score of a conversation: from the cache, or asked for as often as it takes."""
        key = content_hash(NAME, masked_urls(self._judge.base_url), self._settings, messages)
        known = None if self._cache is None else self._cache.find(key)
        if known is not None:
            return known["reply"], await self._read(known["reply"], answer)
        retry = 0
        while True:
            try:
                reply, value = await self._once(messages, answer)
                break
            except JudgeFault as fault:
                retry += 1
                may_pass = fault.may_pass(temperature=self._judge.temperature)
                if not may_pass or retry > self._judge.retries:
                    raise
                await self._wait(retry, fault)
        if self._cache is not None:
            self._cache.keep(key, {"reply": reply})
        return reply, value

    async def _once(self, messages: list[Message], answer: str) -> tuple[str, float]:
        """One request, under the limits of the line and the time for one."""
        judge, line = self._judge, self._line
        async with line.room.here():
            await self._sleep(line.pace.reserve())
            self._counts.add("judging/requests")
            try:
                async with asyncio.timeout(judge.timeout_s):
                    reply = await self._send(messages)
            except TimeoutError as error:
                raise JudgeFault(TIMEOUT, f"no reply within {judge.timeout_s:g} s") from error
            finally:
                beat()
        try:
            return reply, await self._read(reply, answer)
        except JudgeFault as fault:
            fault.reply = reply
            raise

    async def _send(self, messages: list[Message]) -> str:
        """The judge's reply. Every exception of the endpoint or engine becomes a JudgeFault."""
        faults: list[BaseException] = []
        with boundary(faults):
            return await self._line.ask(messages, self._settings)
        fault = faults[0]
        raise fault if isinstance(fault, JudgeFault) else JudgeFault(ENGINE, last_line(fault))

    async def _wait(self, retry: int, fault: JudgeFault) -> None:
        self._counts.add("judging/retries")
        if fault.retry_after_s is not None:  # it applies to every request to this server
            self._line.pace.pause(min(fault.retry_after_s, LONGEST_WAIT_S))
        await self._sleep(wait_before(retry, fault.retry_after_s))
        beat()

    async def _read(self, reply: str, answer: str) -> float:
        """The score in a reply to an answer."""
        judge = self._judge
        if judge.parse == "choice":
            return parser.choice_in(reply, judge.choices, answer)
        if judge.parse == "json":
            number = parser.json_number_in(reply, judge.json_key, answer)
        elif judge.parse == "regex":
            number = await self._by_pattern(reply, answer)
        else:
            best = None if judge.scale is None else judge.scale[1]
            number = parser.number_in(reply, best=best, answer=answer)
        return parser.on_scale(number, judge.scale)

    async def _by_pattern(self, reply: str, answer: str) -> float:
        arguments = {
            "text": parser.without_thinking(reply, answer),
            "pattern": self._judge.pattern,
            "answer": answer,
        }
        call = ScoreCall(
            name=parser.pattern_number_in.__name__,
            source=parser.__file__,
            arguments=arguments,
        )
        [outcome] = await self._executor.run([call])
        if outcome.numbers is not None:
            return outcome.numbers["score"]
        kind = NOT_FINITE if outcome.error is None else UNPARSABLE
        raise JudgeFault(kind, f"pattern: {outcome.error or outcome.refused}")
