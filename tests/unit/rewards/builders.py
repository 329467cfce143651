"""Prompts, rollouts and rewards for these tests."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from luyen.base.records import GroupId, Prompt, Rollout, Score, Source, StopReason, make_prompt
from luyen.config.schema.reward import RewardConfig
from luyen.rewards.build import build_reward
from luyen.rewards.rules.rule import Answer
from luyen.rewards.scoring import ScoredGroup


def prompt(truth: Any = "12", source: str = "arithmetic/sum", **extra: Any) -> Prompt:
    messages = [{"role": "user", "content": "?"}]
    return make_prompt(messages, data_source=source, ground_truth=truth, extra_info=extra)


def answer(text: str, *, length: int = 4) -> Answer:
    return Answer(text=text, response_length=length, stop=StopReason.ANSWERED)


def rollout(text: str, *, draw: int = 0, sample: int = 0, length: int = 4) -> Rollout:
    return Rollout(
        group=GroupId(step=0, draw=draw, uid="u"),
        sample=sample,
        tokens=tuple(range(length + 1)),
        sources=(Source.PROMPT, *(Source.SAMPLED,) * length),
        turns=(0,) * (length + 1),
        logps=(None, *(-0.5,) * length),
        versions=(None, *(0,) * length),
        stop=StopReason.ANSWERED,
        text=text,
    )


def group(asked: Prompt, *texts: str, draw: int = 0) -> tuple[Prompt, list[Rollout]]:
    return asked, [rollout(text, draw=draw, sample=i) for i, text in enumerate(texts)]


def config(**keys: Any) -> RewardConfig:
    return RewardConfig.model_validate(keys)


def scored(
    settings: RewardConfig, groups: Sequence[tuple[Prompt, list[Rollout]]], *, longest: int = 16
) -> list[ScoredGroup]:
    """Build, score, close; no process may be left."""
    with build_reward(settings, max_response_length=longest) as reward:
        found = reward.score(groups)
    assert reward.pids == []
    return found


def scores(settings: RewardConfig, asked: Prompt, *texts: str, longest: int = 16) -> list[Score]:
    """The scores of one group."""
    return list(scored(settings, [group(asked, *texts)], longest=longest)[0].scores)


def own(path: Path, code: str, name: str = "compute_score", **more: Any) -> dict[str, Any]:
    """A `custom_reward_function` block over a file with this code."""
    path.write_text(code)
    return {"path": str(path), "name": name, **more}
