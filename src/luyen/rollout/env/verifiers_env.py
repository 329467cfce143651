"""Environments of the `verifiers` package (0.4) as worlds: the policy is their agent."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.records import Message, Prompt
from luyen.rollout.env.exchange import Exchange
from luyen.rollout.env.given import number_or_none
from luyen.rollout.env.methods import MethodTool
from luyen.rollout.env.protocol import Observation, envs
from luyen.rollout.env.verifiers_door import Environment, call_state, load, package, tool_methods
from luyen.rollout.env.verifiers_seat import Seat, Seats, trace_task
from luyen.rollout.tools.protocol import Tool
from luyen.rollout.tools.signature import Signature
from luyen.rollout.tools.threads import Threads

_threads = Threads(most_hanging=64)


@final
class VerifiersWorld:
    """One episode. The environment's program runs beside the conversation and drives it.

    Tools of its toolsets run in this process. The reward is the sum of the task's own, weighted.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._exchange = Exchange()
        env = environment.env
        self._seat = Seat(self._exchange, getattr(env.config, environment.seat))
        self._toolsets = environment.toolsets()
        self._seen = 0
        turns = asyncio.Lock()
        self.tools: Sequence[Tool] = tuple(
            MethodTool(
                Signature(method, name=name, doc=method.__doc__ or name),
                lambda method=method: self._with_state(method),
                turns=turns,
                threads=_threads,
            )
            for toolset in self._toolsets
            for name, method in tool_methods(toolset)
        )
        """The tools of its toolsets."""

    async def open(self, prompt: Prompt, key: int) -> Sequence[Message]:
        """What the task that the row names begins with; the row's own messages are not used."""
        del key
        number = prompt.extra_info.get("task")
        if not isinstance(number, int):
            why = "a row of a verifiers environment names its task"
            raise UserError("extra_info.task", number, why, "write {task: NUMBER}, from 0")
        task = self._environment.task(number)
        for toolset in self._toolsets:
            await toolset.setup()
            await toolset.setup_task(task.data)
        messages = await self._exchange.start(self._episode(task))
        self._seen = len(messages)
        return messages

    async def act(self, messages: Sequence[Message]) -> Observation:
        """Tell the program what was said; its next message, or that it is done."""
        asked = await self._exchange.tell(messages[self._seen :])
        if asked is None:
            return Observation(is_done=True)
        self._seen = len(messages) + len(asked)
        return Observation(messages=tuple(asked))

    async def score(self) -> float | None:
        """The weighted sum of the rewards; None when the task has none."""
        await self._exchange.finish()
        if self._seat.trace is None:  # its time was up before it began
            return None
        rewards: Mapping[str, Any] = self._seat.trace.rewards
        missing = [name for name, reward in rewards.items() if reward is None]
        if missing:
            raise RuntimeError(f"the reward `{missing[0]}` was not computed")
        return number_or_none(self._seat.trace.reward, "the task") if rewards else None

    async def close(self) -> None:
        """End the program and let the toolsets go."""
        await self._exchange.close()
        for toolset in self._toolsets:
            await toolset._exit_stack.aclose()

    async def _episode(self, task: Any) -> None:
        vf, env = package(), self._environment.env
        agents = Seats(self._environment.seat, self._seat)
        await env.setup(agents)
        await env.run(task, agents)
        if self._seat.trace is None:
            raise RuntimeError("the environment ran no agent")
        info = vf.EnvInfo(id=env.config.env_id)
        episode = vf.Episode(env=info, task=trace_task(task), traces=[self._seat.trace])
        await env.finalize(task, episode)

    def _with_state(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, with the state of this conversation where toolsets look for it."""

        async def call(**arguments: Any) -> Any:
            with call_state(self._seat.trace.state):
                return await _threads.run(method, arguments)

        return call


@envs.register("verifiers")
def verifiers(*, id: str, args: Mapping[str, Any] | None = None) -> VerifiersWorld:
    """An environment of the verifiers package."""
    return VerifiersWorld(load(id, dict(args or {})))
