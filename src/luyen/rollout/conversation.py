"""One conversation: executes the state machine's effects and records the rollout.

A fault of a tool, an environment or a parser ends only this conversation and is recorded in the
rollout. Only errors of the configuration and of the engine are raised.
"""

import asyncio
from collections.abc import Awaitable, Sequence
from dataclasses import replace
from typing import final

from luyen.base.boundary import boundary, last_line
from luyen.base.errors import UserError
from luyen.base.records import Message, Prompt, Rollout, StopReason, ToolCall
from luyen.data.render import Extension, assistant_message, tool_message
from luyen.rollout.client import EngineClient
from luyen.rollout.conversation_config import ConversationConfig, RolloutAddress
from luyen.rollout.conversation_state import (
    Act,
    ConversationState,
    End,
    Event,
    Generate,
    Observe,
    OpenEvent,
    ReplyEvent,
    StopEvent,
    TurnEvent,
    advance,
)
from luyen.rollout.env.protocol import GuardedEnv
from luyen.rollout.parsers.protocol import ParsedTurn
from luyen.rollout.protocol import Sampling
from luyen.rollout.tools.rollout_tools import (
    CallJournal,
    RolloutTools,
    UnknownOutcome,
    finished_call,
)
from luyen.rollout.transcript import UNCHECKED, Transcript, add_mismatch_counts

_ONE_TOO_MANY = "the call was not made: too many calls"


@final
class Conversation:
    """Generates one rollout of a prompt. It is used once."""

    def __init__(
        self,
        address: RolloutAddress,
        prompt: Prompt,
        config: ConversationConfig,
        *,
        client: EngineClient,
        sampling: Sampling,
        version: int,
        deadline: float | None = None,
        ledger: CallJournal | None = None,
    ) -> None:
        """`version` is the weight version to generate with; `ledger` journals tool calls.
        At the deadline (of the loop's clock) the rollout ends as it is.
        """
        self._address = address
        self._prompt = prompt
        self._config = config
        self._client = client
        self._sampling = sampling
        self._version = version
        self._env: GuardedEnv | None = None
        self._tools: RolloutTools | None = None
        self._deadline = deadline
        self._ledger = ledger
        self._transcript = Transcript(())
        self._prompt_length = 0
        self._messages: list[Message] = []
        self._opening_length = 0
        self._turn = -1
        self._text = ""
        self._parsed = ParsedTurn(content="", calls=())
        self._pending: tuple[tuple[Message, ...], Extension] | None = None
        self._calls: list[ToolCall] = []
        self._notes: dict[str, float] = {}
        self._rewards: list[tuple[int, float]] = []

    async def run(self) -> Rollout:
        """The whole conversation, however it ends."""
        clock = asyncio.get_running_loop().time
        started = clock()
        stop, faults = StopReason.FAULT, list[BaseException]()
        try:
            with boundary(faults):
                stop = await self._run()
                if not self._transcript.tokens:
                    raise TimeoutError(
                        "its time was up before its environment and tools had opened"
                    )
                await self._score()
                self._defer_check()
        finally:
            await self._close(faults)
        if faults and (isinstance(faults[0], UserError) or faults[0] is self._client.failure):
            raise faults[0]
        splits = float(len(self._transcript.earlier))
        unknown = {"unknown": 1.0} if faults and isinstance(faults[0], UnknownOutcome) else {}
        notes = {"seconds": clock() - started, "splits": splits, **unknown, **self._tool_metrics()}
        return self._transcript.rollout(
            group=self._address.group,
            sample=self._address.sample,
            stop=StopReason.FAULT if faults else stop,
            text=self._text,
            fault=last_line(faults[0]) if faults else None,
            calls=self._calls,
            messages=self._messages[self._opening_length :],
            given=self._rewards,
            notes={**self._notes, **notes},
        )

    async def _run(self) -> StopReason:
        env = self._config.make_env(self._prompt)
        self._env = None if env is None else GuardedEnv(env, end_s=self._config.end_s)
        limits = replace(self._config.limits, has_env=self._env is not None)
        state, effect = advance(
            ConversationState(), await self._within_deadline(self._open()), limits
        )
        while not isinstance(effect, End):
            state, effect = advance(state, await self._perform(effect), limits)
        return effect.stop

    async def _perform(self, effect: Generate | Act | Observe) -> Event:
        match effect:
            case Generate(max_new_tokens=room):
                return await self._generate(room)
            case Act(run=run):
                return await self._within_deadline(self._act(run))
            case Observe():
                return await self._within_deadline(self._observe())

    async def _within_deadline(self, work: Awaitable[Event]) -> Event:
        """The event that the work returns, or a stop at the deadline."""
        limit = asyncio.timeout_at(self._deadline)
        try:
            async with limit:
                return await work
        except TimeoutError:
            if not limit.expired():
                raise
            return StopEvent(stop=StopReason.TIME_BUDGET)

    async def _open(self) -> Event:
        prompt, key, extra = self._prompt, self._address.env_key, ()
        messages: Sequence[Message] = prompt.messages
        if self._env is not None:
            extra = self._env.tools
            messages = await self._env.open(prompt, key)
        own = {tool.name for tool in extra}
        names = [n for schema in prompt.tools if (n := schema["function"]["name"]) not in own]
        tools, ledger = self._config.tools, self._ledger
        self._tools = await tools.open(prompt, key, names, extra=extra, ledger=ledger)
        self._messages, self._opening_length = list(messages), len(messages)
        self._transcript = Transcript(
            self._config.prompt_cache.tokens(prompt)
            if self._env is None
            else self._config.renderer.prompt_tokens(self._messages, prompt.tools)
        )
        self._prompt_length, most = len(self._transcript), self._config.max_prompt_length
        if self._prompt_length > most:
            raise ValueError(
                f"its environment opens with {self._prompt_length} tokens, at most {most}"
            )
        return OpenEvent(room=self._room(self._prompt_length))

    def _room(self, length: int) -> int:
        """Tokens that may follow a branch of this length; all branches share what is sampled."""
        most = self._config.max_response_length
        return min(self._prompt_length + most - length, most - self._transcript.sampled)

    async def _generate(self, room: int) -> Event:
        self._turn += 1
        if self._pending is not None:
            messages, extension = self._pending
            if extension.restart is not None:
                self._check_branch()
            self._messages += messages
            self._transcript.answer(extension, turn=self._turn)
            self._pending = None
        completion = await self._client.generate(
            tuple(self._transcript.tokens),
            key=self._address.key(turn=self._turn),
            sampling=self._sampling.within(room),
            deadline=self._deadline,
            weights=self._version,
        )
        self._transcript.say(completion, turn=self._turn, version=self._version)
        tokenizer, tokens = self._config.renderer.tokenizer, completion.tokens
        self._text = tokenizer.decode(tokens)
        if tokens and tokens[-1] in tokenizer.stop_ids:  # other stop tokens belong to the text
            tokens = tokens[:-1]
        written = tokenizer.decode(tokens, skip_special=False)
        self._parsed = self._config.parser(written)
        calls = [(call.name, call.arguments) for call in self._parsed.calls]
        self._messages.append(
            assistant_message(self._parsed.content, calls, turn=self._turn, written=written)
        )
        if completion.reason == "aborted":
            return StopEvent(stop=StopReason.TIME_BUDGET)
        return TurnEvent(
            calls=len(self._parsed.calls),
            problems=len(self._parsed.problems),
            is_cut=completion.reason == "length",
        )

    async def _act(self, run: int) -> Event:
        """Run the calls concurrently; their results are in the order of the calls."""
        assert self._tools is not None
        tools, turn = self._tools, self._turn
        running = [
            asyncio.ensure_future(tools.call(call, turn, index))
            for index, call in enumerate(self._parsed.calls[:run])
        ]
        try:
            # Wait for all calls, also where one of them is a fault.
            await asyncio.gather(*running, return_exceptions=True)
        finally:
            calls, broken = self._record_calls(running)
        for one in running:
            one.result()  # the first fault, in the order of writing
        complaints = [call.result for call in broken]
        if not calls:
            # Without a call that it can render, a template has no place for a tool's message.
            return self._reply([{"role": "user", "content": "\n".join(complaints)}])
        texts = [call.result for call in calls]
        texts[-1] = "\n".join([texts[-1], *complaints])
        return self._reply(
            [
                tool_message(call.name, text, turn=turn, index=i)
                for i, (call, text) in enumerate(zip(calls, texts, strict=True))
            ]
        )

    def _record_calls(
        self, running: Sequence["asyncio.Future[ToolCall]"]
    ) -> tuple[list[ToolCall], list[ToolCall]]:
        """Record the turn's calls: those that ran, refused ones, and malformed ones."""
        assert self._tools is not None
        tools, turn, said = self._tools, self._turn, self._parsed
        ran = [finished_call(*pair, turn) for pair in zip(running, said.calls, strict=False)]
        refused = [tools.refused(call, _ONE_TOO_MANY, turn) for call in said.calls[len(running) :]]
        broken = [tools.malformed(problem, turn) for problem in said.problems]
        calls = [*ran, *refused]
        self._calls += [*calls, *broken]
        self._rewards += [(turn, call.reward) for call in calls if call.reward is not None]
        return calls, broken

    async def _observe(self) -> Event:
        assert self._env is not None
        seen = await self._env.act(tuple(self._messages))
        if seen.reward is not None:
            self._rewards.append((self._turn, seen.reward))
        if seen.is_done:
            return ReplyEvent(room=0, is_done=True)
        return self._reply(seen.messages)

    def _reply(self, messages: Sequence[Message]) -> Event:
        extension = self._config.renderer.extend(
            self._transcript.tokens, self._messages, messages, self._prompt.tools
        )
        self._pending = tuple(messages), extension
        return ReplyEvent(room=self._room(self._transcript.length_after(extension)))

    async def _score(self) -> None:
        """Collect the rewards of tools and environment for the whole conversation."""
        if self._tools is not None:
            self._rewards += [(self._turn, value) for value in (await self._tools.score()).values()]
        if self._env is not None:
            value = await self._env.score()
            self._rewards += [] if value is None else [(self._turn, value)]

    async def _close(self, faults: list[BaseException]) -> None:
        """Release tools and environment; errors are appended to `faults`."""
        if self._tools is not None:
            with boundary(faults):
                await self._tools.release()
        if self._env is not None:
            with boundary(faults):
                await self._env.close()

    def _check_branch(self) -> None:
        """Check the current branch against a full rendering of the messages so far."""
        said = self._transcript.branch(), self._messages, self._prompt.tools
        self._notes = add_mismatch_counts(self._notes, *said, self._config)

    def _defer_check(self) -> None:
        """Defer the check of the last branch, unless an environment made the opening messages."""
        if self._env is not None:
            self._check_branch()
        elif self._config.sanity != "off":
            self._notes[UNCHECKED] = 1.0

    def _tool_metrics(self) -> dict[str, float]:
        """Metrics of tools, and how many of them could not be released."""
        if self._tools is None:
            return {}
        found = {f"tools/{name}": value for name, value in self._tools.metrics.items()}
        return {**found, "unreleased": float(len(self._tools.problems))}
