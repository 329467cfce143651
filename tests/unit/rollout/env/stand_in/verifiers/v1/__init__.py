"""Tasks, tasksets, environments and their loader."""

import importlib
import inspect
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from verifiers.v1.mcp.server import Toolset, ToolsetConfig
from verifiers.v1.records import (
    AgentConfig,
    AgentInfo,
    AssistantMessage,
    EnvInfo,
    Episode,
    MessageNode,
    Segment,
    SystemMessage,
    ToolCall,
    ToolMessage,
    Trace,
    TraceTask,
    UserMessage,
)
from verifiers.v1.state import State, argument

__all__ = [
    "AgentConfig",
    "AgentInfo",
    "AssistantMessage",
    "EnvInfo",
    "Episode",
    "MessageNode",
    "Segment",
    "State",
    "SystemMessage",
    "ToolCall",
    "ToolMessage",
    "Toolset",
    "ToolsetConfig",
    "Trace",
    "TraceTask",
    "UserMessage",
]
A, B, C = TypeVar("A"), TypeVar("B"), TypeVar("C")


def _mark(name: str):
    def outer(function=None, **facts):
        def inner(target):
            vars(target).update({name: True, **{f"_vf_{k}": v for k, v in facts.items()}})
            return target

        return inner if function is None else inner(function)

    return outer


reward, metric, stop, tool = (_mark(name) for name in ("reward", "metric", "stop", "tool"))


class TaskConfig(BaseModel):
    pass


class TaskData(BaseModel):
    idx: int | None = None
    prompt: Any = None
    system_prompt: str | None = None
    image: str | None = None


class Task(Generic[A, B, C]):
    NEEDS_CONTAINER = False
    key = hash = ""

    def __init__(self, data, config=None):
        self.data, self.config = data, config

    @classmethod
    def toolsets(cls, config):
        return []

    def hooks(self, name: str):
        found = [getattr(self, n) for n in dir(type(self)) if n not in ("key", "hash")]
        return [f for f in found if inspect.ismethod(f) and name in vars(f.__func__)]

    async def setup(self, trace, runtime):
        pass

    async def finalize(self, trace, runtime):
        pass

    async def score(self, trace, runtime=None):
        given = {"trace": trace, "runtime": runtime, "task": self.data}
        for hook in self.hooks("reward"):
            takes = inspect.signature(hook).parameters
            value = await hook(**{n: v for n, v in given.items() if n in takes})
            trace.record_reward(hook.__name__, value, vars(hook.__func__).get("_vf_weight", 1.0))


class TasksetConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")
    id: str = ""
    task: TaskConfig = TaskConfig()


class Taskset(Generic[A, B]):
    def __init__(self, config):
        self.config = config

    def __iter__(self):
        return iter(self.load())

    @classmethod
    def task_type(cls):
        return argument(cls, Task) or Task

    @classmethod
    def toolsets(cls, config):
        return []


class EnvConfig(BaseModel):
    id: str = ""
    taskset: Any = TasksetConfig()

    @property
    def env_id(self) -> str:
        return self.taskset.id


class Env(Generic[A]):
    def __init__(self, config):
        self.config = config
        self.taskset = _taskset(config.taskset)
        config.taskset = self.taskset.config

    async def setup(self, agents):
        pass

    async def finalize(self, task, episode):
        pass


class SingleAgentEnvConfig(EnvConfig):
    agent: AgentConfig = AgentConfig()


class SingleAgentEnv(Env[SingleAgentEnvConfig]):
    async def run(self, task, agents):
        await agents.agent.run(task)


def _taskset(written):
    given = dict(written)
    module = importlib.import_module(given["id"].replace("-", "_"))
    cls = getattr(module, module.__all__[0])
    return cls((argument(cls, TasksetConfig) or TasksetConfig)(**given))


def resolve_env_config(data):
    return SingleAgentEnvConfig(**data)


def load_environment(config):
    return SingleAgentEnv(config)
