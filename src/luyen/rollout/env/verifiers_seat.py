"""The policy as an agent of the `verifiers` package: what its environments call, asked here."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, final

from luyen.rollout.env.exchange import Exchange
from luyen.rollout.env.verifiers_door import new_state, package, plain, record


@final
class NoRuntime:
    """Stands where tasks look for a runtime; whoever uses it is told that there is none."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"the task wants a runtime (`{name}`), and none is run here")


@final
class Seats:
    """The agents of an environment: one seat, taken by the policy."""

    def __init__(self, name: str, seat: "Seat") -> None:
        self._name = name
        self._seat = seat

    def __getattr__(self, name: str) -> "Seat":
        if name != self._name:
            raise AttributeError(f"there is no agent `{name}`; the policy is `{self._name}`")
        return self._seat


@final
class Seat:
    """An agent that is the policy. It plays once: a conversation is one trace."""

    def __init__(self, exchange: Exchange, config: Any) -> None:
        self._exchange = exchange
        self.config = config
        self.trainable = True
        self.trace: Any = None

    async def run(self, task: Any, **_: Any) -> Any:
        """The policy answers the task; the judged trace."""
        async with self.interaction(task) as talk:
            await talk.turn()
        return self.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **_: Any) -> AsyncIterator["Talk"]:
        """A conversation in which the environment is the user; it is judged when it ends."""
        if self.trace is not None:
            raise RuntimeError("the environment plays its agent twice; a conversation is one play")
        vf = package()
        self.trace = vf.Trace(
            task=trace_task(task), agent=vf.AgentInfo(config=self.config), state=new_state(task)
        )
        await task.setup(self.trace, NoRuntime())
        yield Talk(self._exchange, task, self.trace)
        self.trace.stop("agent_completed")
        await task.finalize(self.trace, NoRuntime())
        await task.score(self.trace, NoRuntime())
        self.trace.ok = True


@final
class Talk:
    """The conversation as an environment of the package drives it."""

    def __init__(self, exchange: Exchange, task: Any, trace: Any) -> None:
        self._exchange = exchange
        self._task = task
        self.trace = trace
        self._has_begun = False

    async def turn(self, message: Any = None) -> Any:
        """Say something to the policy, or let the task's prompt speak; what it answers."""
        vf = package()
        said = await self._exchange.ask(self._said_with(message))
        if said is None:
            self.trace.stop("max_turns")
            return vf.Segment(messages=[], terminated=True)
        return vf.Segment(messages=record(self.trace, said, sampled=True))

    def _said_with(self, message: Any) -> Sequence[Mapping[str, Any]]:
        """What the policy reads: the beginning of the task at first, then the message."""
        said = _listed(message)
        if not self._has_begun:
            data = self._task.data
            is_silent = data.prompt is None
            if is_silent is (message is None):
                raise ValueError("a task with a prompt is opened by turn(), others by turn(text)")
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
