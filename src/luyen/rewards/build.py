"""From the `reward` block to the reward of a run."""

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Self, final

from luyen.base.errors import UserError
from luyen.base.records import Rollout
from luyen.config.reward_parts import read_components, read_routes
from luyen.config.schema.reward import Component
from luyen.config.schema.reward import Reward as RewardConfig
from luyen.rewards import ways
from luyen.rewards.calls import Executor
from luyen.rewards.components import RuleReward, knobs_of
from luyen.rewards.compose import Weighted, WeightedSum
from luyen.rewards.custom import CustomReward
from luyen.rewards.pool import Pool
from luyen.rewards.protocol import Group, Reward
from luyen.rewards.registries import Given, reward_managers
from luyen.rewards.routing import Routed, routes_in_force
from luyen.rewards.rules.all import rule_rewards
from luyen.rewards.step import Judging, Scored, score_all, settle

MANAGERS = ways
"""Importing it registers the managers that come with the package."""


def build_reward(reward: RewardConfig, *, max_response_length: int) -> "BuiltReward":
    """The reward that a block describes. Close it at the end, or use it in a `with`."""
    make = reward_managers.get(reward.reward_manager.name)
    pool = Pool(size=_processes(reward), timeout_s=reward.timeout_s)
    judges = Judges(reward, pool=pool, max_response_length=max_response_length)
    given = Given(
        reward=reward, max_response_length=max_response_length, pool=pool, build=judges.build
    )
    return BuiltReward(make(given), reward=reward, pool=pool, judges=judges)


def _processes(reward: RewardConfig) -> int:
    """Rules compute, so more processes than cores only cost memory; your own code may wait."""
    is_own = reward.custom_reward_function.path is not None
    return reward.num_workers if is_own else min(reward.num_workers, os.cpu_count() or 1)


@final
class Judges:
    """Builds what the configuration judges by, and remembers what it built."""

    def __init__(self, reward: RewardConfig, *, pool: Pool, max_response_length: int) -> None:
        components, wrong = read_components(reward)
        if wrong:
            raise UserError("reward.components", reward.components, wrong[0], "mend the component")
        self._reward = reward
        self._pool = pool
        self._max_response_length = max_response_length
        self._routes = routes_in_force(read_routes(reward), components)
        self.routed: list[Routed] = []

    def build(self, executor: Executor) -> Reward:
        """The custom function, or the routes, with calls made by this executor."""
        custom_reward_function = self._reward.custom_reward_function
        if custom_reward_function.path is not None:
            return CustomReward(
                custom_reward_function.path,
                custom_reward_function.name,
                custom_reward_function.reward_kwargs,
                executor=executor,
            )
        routed = Routed(self._routes, build=lambda parts: self._sum(parts, executor))
        self.routed.append(routed)
        return routed

    def _sum(self, components: Mapping[str, Component], executor: Executor) -> Reward:
        return WeightedSum(
            [
                Weighted(name=name, weight=part.weight, reward=self._rule(part, executor))
                for name, part in components.items()
            ]
        )

    def _rule(self, component: Component, executor: Executor) -> Reward:
        knobs = dict(component.kwargs)
        if "max_response_length" in knobs_of(rule_rewards.get(component.rule)):
            knobs.setdefault("max_response_length", self._max_response_length)
        is_isolated = rule_rewards.facts(component.rule).get("isolated", False)
        return RuleReward(component.rule, knobs, executor=self._pool if is_isolated else executor)


@final
class BuiltReward:
    """The reward of a run: what its manager made, with the processes and the policy for faults."""

    def __init__(self, inner: Reward, *, reward: RewardConfig, pool: Pool, judges: Judges) -> None:
        self._inner = inner
        self._pool = pool
        self._judges = judges
        self._num_workers = reward.num_workers
        self._on_fault = reward.on_fault

    @property
    def names(self) -> tuple[str, ...]:
        """Components that a score may hold, as far as they are known beforehand."""
        return self._inner.names

    @property
    def pids(self) -> list[int]:
        """Ids of the processes it has started."""
        return self._pool.pids

    def judge(self, groups: Sequence[Group], work: Judging | None = None) -> list[Scored]:
        """Every group with its scores, in order; those that the journal has are not judged anew."""
        scored = score_all(self._inner, groups, num_workers=self._num_workers, work=work)
        return asyncio.run(scored)

    def check_sources(self, sources: Iterable[str]) -> None:
        """Raise a UserError, before anything is sampled, if some data source cannot be judged."""
        asked = list(sources)
        for routed in self._judges.routed:
            routed.check_sources(asked)

    def settle(self, scored: Sequence[Scored]) -> list[Rollout]:
        """The rollouts to leave out; a UserError when `reward.on_fault` says to stop instead."""
        return settle(scored, on_fault=self._on_fault)

    def close(self) -> None:
        """End every process. Closing twice is allowed."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
