"""A language model that judges: it is asked about every answer, and its reply is read strictly."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.faults import last_line
from luyen.base.foreign import boundary
from luyen.base.heartbeat import beat
from luyen.base.records import Message, Prompt, Rollout, Score
from luyen.base.secrets import masked_urls
from luyen.config.schema.judge import ENGINE as OWN_ENGINE
from luyen.config.schema.judge import Judge
from luyen.rewards import judge_reply
from luyen.rewards.cache import ScoreCache, content_hash
from luyen.rewards.calls import Call, Executor
from luyen.rewards.clock import add_time
from luyen.rewards.counts import Counts
from luyen.rewards.judge_endpoint import Endpoint
from luyen.rewards.judge_faults import ENGINE, NOT_FINITE, TIMEOUT, UNPARSABLE, JudgeFault
from luyen.rewards.judge_prompt import messages_for
from luyen.rewards.limits import LONGEST_WAIT_S, Pace, Room, wait_before
from luyen.rewards.protocol import Ask

NAME = "judge"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A way to ask, with the limits that everybody who uses it shares.

    Example:
        >>> Line(ask=None, pace=Pace(per_minute=None), room=Room(4)).pace.reserve()
        0.0
    """

    ask: Ask
    """Puts a conversation to the model."""
    pace: Pace
    """How often."""
    room: Room
    """How many at once."""


@final
class Judges:
    """Makes judges. Those that ask the same endpoint share its limits and the cache.

    What the engine of the run says is never cached.
    """

    def __init__(
        self, *, own: Ask | None, executor: Executor, cache: ScoreCache | None, counts: Counts
    ) -> None:
        """`own` asks the engine of the run; `executor` runs patterns, which could hang."""
        self._own = own
        self._executor = executor
        self._cache = cache
        self._counts = counts
        self._lines: dict[tuple[Any, ...], Line] = {}

    def judge(self, judge: Judge) -> "JudgeReward":
        """The judge of a block; a UserError when it cannot be asked here."""
        limits = judge.concurrency, judge.requests_per_minute
        place = (judge.base_url, judge.api_key_env, *limits)
        if place not in self._lines:
            self._lines[place] = Line(
                ask=self._ask(judge),
                pace=Pace(per_minute=judge.requests_per_minute),
                room=Room(judge.concurrency),
            )
        # The policy learns: tomorrow it would answer otherwise, under the same key.
        cache = None if judge.base_url == OWN_ENGINE else self._cache
        line, counts = self._lines[place], self._counts
        return JudgeReward(judge, line, executor=self._executor, cache=cache, counts=counts)

    def _ask(self, judge: Judge) -> Ask:
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
        judge: Judge,
        line: Line,
        *,
        executor: Executor,
        cache: ScoreCache | None,
        counts: Counts,
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
            value = await self._value(messages_for(self._judge, prompt, rollout.text))
            score = Score(name=NAME, value=value)
        except JudgeFault as fault:
            self._counts.add(f"judging/faults/{fault.kind}")
            score = Score(name=NAME, value=None, error=str(fault))
        seconds = perf_counter() - start
        add_time(rollout, seconds)
        return replace(score, seconds=seconds)

    async def _value(self, messages: list[Message]) -> float:
        """The score of a conversation: out of the cache, or asked for as often as it takes."""
        key = content_hash(NAME, masked_urls(self._judge.base_url), self._settings, messages)
        known = None if self._cache is None else self._cache.find(key)
        if known is not None:
            return await self._read(known["reply"])
        retry = 0
        while True:
            try:
                reply, value = await self._once(messages)
                break
            except JudgeFault as fault:
                retry += 1
                may_pass = fault.may_pass(temperature=self._judge.temperature)
                if not may_pass or retry > self._judge.retries:
                    raise
                await self._wait(retry, fault)
        if self._cache is not None:
            self._cache.keep(key, {"reply": reply})
        return value

    async def _once(self, messages: list[Message]) -> tuple[str, float]:
        """One request, under the limits of the line and the time for one."""
        judge, line = self._judge, self._line
        async with line.room.here():
            await self._sleep(line.pace.reserve())
            self._counts.add("judging/requests")
            try:
                async with asyncio.timeout(judge.timeout_s):
                    reply = await self._asked(messages)
            except TimeoutError as error:
                raise JudgeFault(TIMEOUT, f"no reply within {judge.timeout_s:g} s") from error
            finally:
                beat()
        return reply, await self._read(reply)

    async def _asked(self, messages: list[Message]) -> str:
        """The reply of whoever is asked; whatever they raise is a fault with a name."""
        faults: list[BaseException] = []
        with boundary(faults):
            return await self._line.ask(messages, self._settings)
        fault = faults[0]
        raise fault if isinstance(fault, JudgeFault) else JudgeFault(ENGINE, last_line(fault))

    async def _wait(self, retry: int, fault: JudgeFault) -> None:
        self._counts.add("judging/retries")
        if fault.retry_after_s is not None:  # the server speaks to everybody who asks it
            self._line.pace.pause(min(fault.retry_after_s, LONGEST_WAIT_S))
        await self._sleep(wait_before(retry, fault.retry_after_s))
        beat()

    async def _read(self, reply: str) -> float:
        """The score in a reply."""
        judge = self._judge
        if judge.parse == "choice":
            return judge_reply.choice_in(reply, judge.choices)
        if judge.parse == "json":
            number = judge_reply.json_number_in(reply, judge.json_key)
        elif judge.parse == "regex":
            number = await self._by_pattern(reply)
        else:
            best = None if judge.scale is None else judge.scale[1]
            number = judge_reply.number_in(reply, best=best)
        return judge_reply.on_scale(number, judge.scale)

    async def _by_pattern(self, reply: str) -> float:
        arguments = {"text": judge_reply.spoken(reply), "pattern": self._judge.pattern}
        call = Call(
            name=judge_reply.pattern_number_in.__name__,
            source=judge_reply.__file__,
            arguments=arguments,
        )
        [outcome] = await self._executor.run([call])
        if outcome.numbers is not None:
            return outcome.numbers["score"]
        kind = NOT_FINITE if outcome.error is None else UNPARSABLE
        raise JudgeFault(kind, f"pattern: {outcome.error or outcome.refused}")
