"""Messages, tasks' data, traces and episodes."""

from typing import Any

from pydantic import BaseModel, Field

from verifiers.v1.state import State


class SystemMessage(BaseModel):
    role: str = "system"
    content: Any


class UserMessage(BaseModel):
    role: str = "user"
    content: Any


class ToolCall(BaseModel):
    id: str
    name: str
    arguments: str


class AssistantMessage(BaseModel):
    role: str = "assistant"
    content: str | None = None
    tool_calls: list[ToolCall] | None = None


class ToolMessage(BaseModel):
    role: str = "tool"
    tool_call_id: str
    content: Any
    name: str | None = None


class MessageNode(BaseModel):
    message: Any
    parent: int | None = None
    sampled: bool = False


class Segment(BaseModel):
    messages: list[Any]
    terminated: bool = False

    @property
    def last_reply(self) -> str:
        said = [m.content or "" for m in self.messages if m.role == "assistant"]
        return said[-1].strip() if said else ""


class AgentConfig(BaseModel):
    pass


class AgentInfo(BaseModel):
    config: Any


class TraceTask(BaseModel):
    type: str
    data: Any
    key: str | None = None
    hash: str | None = None


class Reward(BaseModel):
    score: float
    weight: float = 1.0


class Trace(BaseModel):
    task: TraceTask
    agent: AgentInfo
    state: Any = Field(default_factory=State)
    nodes: list[MessageNode] = Field(default_factory=list)
    rewards: dict[str, Reward | None] = Field(default_factory=dict)
    metrics: dict[str, float] = Field(default_factory=dict)
    stop_condition: str | None = None
    ok: bool = False

    def _of(self, role: str) -> list[Any]:
        return [n.message for n in self.nodes if n.message.role == role]

    @property
    def reward(self) -> float:
        return sum(r.score * r.weight for r in self.rewards.values() if r is not None)

    @property
    def num_turns(self) -> int:
        return sum(n.sampled for n in self.nodes)

    @property
    def tool_messages(self) -> list[Any]:
        return self._of("tool")

    @property
    def last_reply(self) -> str:
        said = self._of("assistant")
        return (said[-1].content or "").strip() if said else ""

    def record_reward(self, name: str, value: float, weight: float = 1.0) -> None:
        self.rewards[name] = Reward(score=float(value), weight=float(weight))

    def stop(self, condition: str) -> None:
        self.stop_condition = self.stop_condition or condition


class EnvInfo(BaseModel):
    id: str


class Episode(BaseModel):
    env: EnvInfo
    task: TraceTask
    traces: list[Trace] = Field(default_factory=list)
