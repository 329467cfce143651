"""The adapter to the `verifiers` package, 0.4: its loaders and its records.

Its environments are programs that run agents on tasks. Here the policy is the agent: no harness,
no runtime and no model server of the package is started.
"""

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

from luyen.base.boundary import boundary
from luyen.base.errors import UserError
from luyen.base.records import Message
from luyen.rollout.tools.user_code import line_of, load_user_name, place_of

FIELD = "actor_rollout_ref.rollout.multi_turn.environments"
_FIX = 'install it: pip install "luyen[environments]"'


def package() -> Any:
    """`verifiers.v1`; a UserError when it is not there, or older."""
    try:
        import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        why = f"the verifiers package cannot be imported: {error}"
        raise UserError(FIELD, "verifiers", why, _FIX) from error
    if "resolve_env_config" not in vars(vf):
        why = "this version of the verifiers package has another interface"
        raise UserError(FIELD, "verifiers", why, _FIX)
    return vf


@final
class Environment:
    """An environment of the package with its tasks, loaded once for a run."""

    def __init__(self, env: Any) -> None:
        """A UserError when it plays more agents than the policy can be."""
        vf = package()
        self.env = env
        agents = [name for name, value in env.config if isinstance(value, vf.AgentConfig)]
        if len(agents) != 1:
            why = f"it plays {len(agents)} agents ({', '.join(agents)}), and the policy is one"
            raise UserError(FIELD, type(env).__name__, why, "choose one with a single agent")
        self.agent_name: str = agents[0]
        self._tasks: list[Any] = []
        self._more: Iterator[Any] = iter(env.taskset)

    def toolsets(self) -> list[Any]:
        """New instances of its toolsets; a UserError for a toolset on a remote server."""
        taskset = self.env.taskset
        task_config = taskset.config.task
        made = [
            *type(taskset).task_type().toolsets(task_config),
            *type(taskset).toolsets(taskset.config),
        ]
        for toolset in made:
            if vars(toolset.config).get("url") is not None:
                why = f"{type(toolset).__name__} is a remote server"
                raise UserError(FIELD, toolset.config.url, why, "give its address as an MCP tool")
        return made

    def task(self, number: int) -> Any:
        """A task by its number; a UserError when there is none, or it is unsupported."""
        while len(self._tasks) <= number:
            task = next(self._more, None)
            if task is None:
                why = f"the environment has {len(self._tasks)} tasks"
                raise UserError("extra_info.task", number, why, "number them from 0")
            self._tasks.append(task)
        task = self._tasks[number]
        hooks = [*task.hooks("stop"), *_decorated(task, "intercept")]
        wants = "a container" if task.NEEDS_CONTAINER or task.data.image else ""
        wants = f"hooks into model calls ({hooks[0].__name__})" if hooks else wants
        if wants:
            name = type(task).__name__
            raise UserError(FIELD, name, f"its tasks want {wants}", "choose another environment")
        return task


_loaded: dict[tuple[str, str], Environment] = {}


def load(name: str, args: Mapping[str, Any]) -> Environment:
    """An installed environment by its id, or what `FILE.py:NAME` or `MODULE.NAME` makes of `args`.

    A UserError says what is wrong with it.
    """
    key = name, repr(sorted(args.items()))
    if key not in _loaded:
        vf = package()
        make = partial(_installed, vf, name, args)
        if ".py:" in name or ("." in name and "@" not in name):
            make = partial(load_user_name(name, FIELD), **args)
        faults: list[BaseException] = []
        with boundary(faults):
            made = make()
            _loaded[key] = Environment(made if isinstance(made, vf.Env) else _around(vf, made))
        if faults:
            if isinstance(faults[0], UserError):
                raise faults[0]
            why = f"it cannot be loaded: {line_of(faults[0])} ({place_of(faults[0])})"
            raise UserError(FIELD, name, why, "install it, or change args") from faults[0]
    return _loaded[key]


def _installed(vf: Any, name: str, args: Mapping[str, Any]) -> Any:
    return vf.load_environment(vf.resolve_env_config({"taskset": {**args, "id": name}}))


def _around(vf: Any, taskset: Any) -> "OneAgent":
    if not isinstance(taskset, vf.Taskset):
        said = type(taskset).__name__
        raise TypeError(f"a loader gives an Env or a Taskset of verifiers, not {said}")
    return OneAgent(vf, taskset)


@final
class OneAgent:
    """The environment of tasks that came without one: the agent answers, and that is all.

    The package's own cannot be made around tasks that are not installed under an id.
    """

    def __init__(self, vf: Any, taskset: Any) -> None:
        self.config = vf.SingleAgentEnvConfig()
        self.taskset = taskset

    async def setup(self, agents: Any) -> None:
        """Nothing is to be prepared."""

    async def run(self, task: Any, agents: Any) -> None:
        """One answer."""
        await agents.agent.run(task)

    async def finalize(self, task: Any, episode: Any) -> None:
        """Nothing to do: the task scores."""


def tool_methods(toolset: Any) -> Iterator[tuple[str, Any]]:
    """The tools of a toolset, named as agents of the package see them."""
    prefix = f"{toolset.server_name}_" if toolset.server_name else ""
    for method in _decorated(toolset, "tool"):
        own = vars(method.__func__).get("tool_name") or method.__name__
        yield f"{prefix}{own}", method


def _decorated(made: Any, mark: str) -> list[Any]:
    names = [name for name in dir(type(made)) if mark in _marks(getattr(type(made), name))]
    return [getattr(made, name) for name in names]


def _marks(value: Any) -> Mapping[str, Any]:
    return vars(value) if callable(value) and "__dict__" in dir(value) else {}


@contextmanager
def call_state(state: Any) -> Generator[None]:
    """Let toolsets find this state while one of their tools runs."""
    from verifiers.v1.mcp.server import (  # pyright: ignore[reportMissingImports]
        _call_state,  # pyright: ignore[reportUnknownVariableType]
    )

    variable: Any = _call_state
    token = variable.set(state)
    try:
        yield
    finally:
        variable.reset(token)


def new_state(task: Any) -> Any:
    """A new state object that a task's tools and hooks share."""
    from verifiers.v1.state import (  # pyright: ignore[reportMissingImports]
        state_cls,  # pyright: ignore[reportUnknownVariableType]
    )

    return state_cls(type(task))()


def plain(message: Any) -> Message:
    """A message of the package as ours."""
    fields = dict(message) if isinstance(message, Mapping) else message.model_dump()
    content = fields["content"]
    if not isinstance(content, str):
        content = "\n".join(str(part.get("text", "")) for part in content or ())
    return {"role": fields["role"], "content": content}


def record(trace: Any, messages: Sequence[Any], *, sampled: bool) -> list[Any]:
    """Write messages, ours or the package's, into a trace; those of the package come back."""
    vf = package()
    typed = [_typed(vf, m) if isinstance(m, Mapping) else m for m in messages]
    for message in typed:
        above = len(trace.nodes) - 1 if trace.nodes else None
        is_sampled = sampled and message.role == "assistant"
        trace.nodes.append(vf.MessageNode(message=message, parent=above, sampled=is_sampled))
    return typed


def _typed(vf: Any, message: Message) -> Any:
    content = message.get("content") or ""
    if message["role"] == "assistant":
        calls = [
            vf.ToolCall(
                id=call["id"],
                name=call["function"]["name"],
                arguments=json.dumps(call["function"]["arguments"]),
            )
            for call in message.get("tool_calls") or ()
        ]
        return vf.AssistantMessage(content=content, tool_calls=calls or None)
    if message["role"] == "tool":
        name = message.get("name")
        return vf.ToolMessage(tool_call_id=message["tool_call_id"], content=content, name=name)
    kinds = {"system": vf.SystemMessage, "user": vf.UserMessage}
    return kinds[message["role"]](content=content)
