"""Environments of the `verifiers` package (0.4): the policy is their agent."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias, final

from luyen.base.boundary import boundary
from luyen.base.errors import UserError
from luyen.base.records import Message, Prompt
from luyen.rollout.env.class_env import MethodTool
from luyen.rollout.env.protocol import Observation, envs, number_or_none
from luyen.rollout.env.verifiers_adapter import (
    Environment,
    call_state,
    load,
    new_state,
    package,
    plain,
    record,
    tool_methods,
)
from luyen.rollout.tools.executors import ThreadExecutor
from luyen.rollout.tools.protocol import Tool
from luyen.rollout.tools.signature import Signature

Messages: TypeAlias = Sequence[Message]
_END_S = 30.0
_GRACE_S = 1.0


@final
class Exchange:
    """Connects an environment that calls the policy with a conversation that calls its environment.

    The two coroutines alternate: the environment's program runs while the conversation waits, and
    waits while the policy generates.
    """

    def __init__(self) -> None:
        self._questions: asyncio.Queue[Messages] = asyncio.Queue()
        self._replies: asyncio.Queue[Messages | None] = asyncio.Queue()
        self._program: asyncio.Task[None] | None = None
        self._is_over = False

    async def ask(self, messages: Messages) -> Messages | None:
        """For the program: send messages; the policy's reply, or None at the end.

        A RuntimeError when it is called again after that.
        """
        if self._is_over:
            raise RuntimeError("the conversation is over, and the environment asks on")
        self._questions.put_nowait(messages)
        said = await self._replies.get()
        self._is_over = said is None
        return said

    async def start(self, program: Coroutine[Any, Any, None]) -> Messages:
        """For the conversation: run the program up to its first question."""
        self._program = asyncio.create_task(_guarded(program))
        first = await self._question()
        if first is None:
            raise RuntimeError("the environment ended without asking the policy anything")
        return first

    async def tell(self, messages: Messages) -> Messages | None:
        """For the conversation: send the policy's turn; the next question, or None at the end."""
        self._replies.put_nowait(messages)
        return await self._question()

    async def finish(self) -> None:
        """For the conversation: end the program. What it raises is raised here."""
        if self._program is None:
            return
        self._replies.put_nowait(None)
        await asyncio.wait({self._program}, timeout=_END_S)
        if not self._program.done():
            raise TimeoutError(f"the environment did not end within {_END_S:g} s")
        self._program.result()

    async def close(self) -> None:
        """Cancel the program; one that ignores the cancellation is abandoned."""
        if self._program is None:
            return
        self._program.cancel()
        await asyncio.wait({self._program}, timeout=_GRACE_S)
        if self._program.done() and not self._program.cancelled():
            self._program.exception()  # retrieved: `finish` raises it

    async def _question(self) -> Messages | None:
        assert self._program is not None
        question = asyncio.ensure_future(self._questions.get())
        try:
            await asyncio.wait({question, self._program}, return_when=asyncio.FIRST_COMPLETED)
            if question.done():
                return question.result()
            self._program.result()
            return None
        finally:
            question.cancel()


async def _guarded(program: Coroutine[Any, Any, None]) -> None:
    """The program as a task that cannot end the event loop, as SystemExit in a task would."""
    faults: list[BaseException] = []
    with boundary(faults):
        await program
    if faults:
        raise faults[0]


@final
class NoRuntime:
    """Placeholder for a task's runtime; using it raises an error that there is none."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"the task wants a runtime (`{name}`), and none is run here")


@final
class AgentTable:
    """The agents of an environment: exactly one, the policy."""

    def __init__(self, name: str, agent: "PolicyAgent") -> None:
        self._name = name
        self._agent = agent

    def __getattr__(self, name: str) -> "PolicyAgent":
        if name != self._name:
            raise AttributeError(f"there is no agent `{name}`; the policy is `{self._name}`")
        return self._agent


@final
class PolicyAgent:
    """The policy as an agent of the `verifiers` package. A conversation is one trace."""

    def __init__(self, exchange: Exchange, config: Any) -> None:
        self._exchange = exchange
        self.config = config
        self.trainable = True
        self.trace: Any = None

    async def run(self, task: Any, **_: Any) -> Any:
        """One turn of the policy; the scored trace."""
        async with self.interaction(task) as talk:
            await talk.turn()
        return self.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator["AgentInteraction"]:
        """A conversation in which the environment is the user; it is scored when it ends."""
        if self.trace is not None:
            raise RuntimeError("the environment plays its agent twice; a conversation is one play")
        vf = package()
        self.trace = vf.Trace(
            task=trace_task(task), agent=vf.AgentInfo(config=self.config), state=new_state(task)
        )
        await task.setup(self.trace, NoRuntime())
        yield AgentInteraction(self._exchange, task, self.trace)
        self.trace.stop("agent_completed")
        await task.finalize(self.trace, NoRuntime())
        await task.score(self.trace, NoRuntime())
        self.trace.ok = True


@final
class AgentInteraction:
    """The conversation as an environment of the package drives it."""

    def __init__(self, exchange: Exchange, task: Any, trace: Any) -> None:
        self._exchange = exchange
        self._task = task
        self.trace = trace
        self._has_begun = False

    async def turn(self, message: Any = None) -> Any:
        """Say something to the policy, or let the task's prompt speak; what it answers."""
        vf = package()
        said = await self._exchange.ask(self._next_messages(message))
        if said is None:
            self.trace.stop("max_turns")
            return vf.Segment(messages=[], terminated=True)
        return vf.Segment(messages=record(self.trace, said, sampled=True))

    def _next_messages(self, message: Any) -> Sequence[Mapping[str, Any]]:
        """Messages to the policy: the task's opening in the first turn, then `message`."""
        said = _listed(message)
        if not self._has_begun:
            data = self._task.data
            is_silent = data.prompt is None
            if is_silent is (message is None):
                raise ValueError(
                    "a task with a prompt is opened by turn(), a task without one by turn(text)"
                )
            begun = [] if data.system_prompt is None else [("system", data.system_prompt)]
            opening = [{"role": role, "content": text} for role, text in begun]
            said = [*opening, *(said if is_silent else _listed(data.prompt))]
        elif not said:
            raise ValueError("there is nothing to answer: turn(text) says what comes next")
        self._has_begun = True
        shown = [plain(one) for one in said]
        record(self.trace, shown, sampled=False)
        return shown


def _listed(message: Any) -> list[Any]:
    if message is None:
        return []
    return [{"role": "user", "content": message}] if isinstance(message, str) else list(message)


def trace_task(task: Any) -> Any:
    """A task as traces name it."""
    vf = package()
    return vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)


_threads = ThreadExecutor(most_hanging=64)


@final
class VerifiersEnv:
    """One episode. The environment's program runs concurrently and drives the conversation.

    Tools of its toolsets run in this process. The reward is the sum of the task's own, weighted.
    """

    def __init__(self, environment: Environment) -> None:
        self._environment = environment
        self._exchange = Exchange()
        env = environment.env
        self._agent = PolicyAgent(self._exchange, getattr(env.config, environment.agent_name))
        self._toolsets = environment.toolsets()
        self._seen = 0
        lock = asyncio.Lock()
        self.tools: Sequence[Tool] = tuple(
            MethodTool(
                Signature(method, name=name, doc=method.__doc__ or name),
                lambda method=method: self._with_state(method),
                lock=lock,
                threads=_threads,
            )
            for toolset in self._toolsets
            for name, method in tool_methods(toolset)
        )
        """The tools of its toolsets."""

    async def open(self, prompt: Prompt, key: int) -> Sequence[Message]:
        """Opening messages of the task that the row names; the row's own messages are not used."""
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
        """Send the policy's turn to the program; its next messages, or that it is done."""
        question = await self._exchange.tell(messages[self._seen :])
        if question is None:
            return Observation(is_done=True)
        self._seen = len(messages) + len(question)
        return Observation(messages=tuple(question))

    async def score(self) -> float | None:
        """The weighted sum of the rewards; None when the task has none."""
        await self._exchange.finish()
        if self._agent.trace is None:  # its time was up before it began
            return None
        rewards: Mapping[str, Any] = self._agent.trace.rewards
        missing = [name for name, reward in rewards.items() if reward is None]
        if missing:
            raise RuntimeError(f"the reward `{missing[0]}` was not computed")
        return number_or_none(self._agent.trace.reward, "the task") if rewards else None

    async def close(self) -> None:
        """End the program and close the toolsets."""
        await self._exchange.close()
        for toolset in self._toolsets:
            await toolset._exit_stack.aclose()

    async def _episode(self, task: Any) -> None:
        vf, env = package(), self._environment.env
        agents = AgentTable(self._environment.agent_name, self._agent)
        await env.setup(agents)
        await env.run(task, agents)
        if self._agent.trace is None:
            raise RuntimeError("the environment ran no agent")
        info = vf.EnvInfo(id=env.config.env_id)
        episode = vf.Episode(env=info, task=trace_task(task), traces=[self._agent.trace])
        await env.finalize(task, episode)

    def _with_state(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """The method, with the state of this conversation where toolsets look for it."""

        async def call(**arguments: Any) -> Any:
            with call_state(self._agent.trace.state):
                return await _threads.run(method, arguments)

        return call


@envs.register("verifiers")
def verifiers(*, id: str, args: Mapping[str, Any] | None = None) -> VerifiersEnv:
    """An environment of the verifiers package."""
    return VerifiersEnv(load(id, dict(args or {})))
