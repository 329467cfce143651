"""Rollouts with tool calls for these tests."""

from typing import Any

from luyen.base.records import CallStatus, GroupId, Rollout, Source, StopReason, ToolCall
from luyen.rewards.rules.all import rule_rewards
from tests.unit.rewards.builders import prompt


def call(name: str = "calc", *, turn: int = 0, status: str = "ok", **more: Any) -> ToolCall:
    result = more.pop("result", "")
    return ToolCall(turn=turn, name=name, status=CallStatus(status), result=result, **more)


def conversation(*calls: ToolCall, text: str = "12", sample: int = 0, **more: Any) -> Rollout:
    """A rollout with a sampled token for each of three turns."""
    return Rollout(
        group=GroupId(step=0, draw=0, uid="u"),
        sample=sample,
        tokens=(1, 2, 3, 4),
        sources=(Source.PROMPT, *(Source.SAMPLED,) * 3),
        turns=(0, 0, 1, 2),
        logps=(None, -0.5, -0.5, -0.5),
        versions=(None, 0, 0, 0),
        stop=StopReason.ANSWERED,
        text=text,
        calls=calls,
        **more,
    )


def judged(rule: str, rollout: Rollout, **hparams: Any) -> Any:
    """What a rule says about a rollout."""
    return rule_rewards.get(rule)(prompt(), rollout, **hparams)
