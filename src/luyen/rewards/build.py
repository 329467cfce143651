"""From the `reward` block to the reward of a run."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, final

from luyen.base.loops import run_loosely
from luyen.base.paths import expanded
from luyen.base.records import Rollout
from luyen.config.schema.reward import Reward as RewardConfig
from luyen.rewards import ways
from luyen.rewards.cache import FILE, ScoreCache
from luyen.rewards.counts import Counts
from luyen.rewards.growth import TreeBuilder
from luyen.rewards.guarded import managed
from luyen.rewards.pool import Pool
from luyen.rewards.protocol import Group, Reward, Services
from luyen.rewards.registries import Given
from luyen.rewards.seen import values_seen
from luyen.rewards.step import VALIDATION, Judging, Scored, Tolerance, score_all, settle
from luyen.rewards.tree import plainly

MANAGERS = ways
"""Importing it registers the managers that come with the package."""


def build_reward(
    reward: RewardConfig,
    *,
    max_response_length: int,
    services: Services | None = None,
    folder: Path | None = None,
    require: Sequence[str] = (),
) -> "BuiltReward":
    """The reward that a block describes. Close it at the end, or use it in a `with`.

    `folder` is the run directory, where a cache without a path of its own is kept; without one it
    lives in memory. `require` are promises of the sandbox (`sandbox.require`) without which no
    program is run.
    """
    memory = None if reward.memory_mb is None else reward.memory_mb * 2**20
    pool = Pool(size=_processes(reward), timeout_s=reward.timeout_s, memory_bytes=memory)
    counts = Counts()
    cache = _cache(reward, folder, counts)
    builder = TreeBuilder(
        reward,
        pool=pool,
        services=services or Services(),
        cache=cache,
        counts=counts,
        max_response_length=max_response_length,
        require=require,
    )
    given = Given(
        reward=reward, max_response_length=max_response_length, pool=pool, build=builder.build
    )
    return BuiltReward(
        managed(reward.reward_manager.name, given),
        reward=reward,
        pool=pool,
        builder=builder,
        cache=cache,
        counts=counts,
        closing=services.closing if services is not None else None,
    )


def _processes(reward: RewardConfig) -> int:
    """Rules compute, so more processes than cores only cost memory; your own code may wait."""
    is_own = reward.custom_reward_function.path is not None
    return reward.num_workers if is_own else min(reward.num_workers, os.cpu_count() or 1)


def _cache(reward: RewardConfig, folder: Path | None, counts: Counts) -> ScoreCache | None:
    if not reward.cache.enable:
        return None
    if reward.cache.path is not None:
        return ScoreCache(expanded(reward.cache.path), counts=counts)
    return ScoreCache(None if folder is None else folder / FILE, counts=counts)


@final
class BuiltReward:
    """The reward of a run: what its manager made, with the processes and the policy for faults."""

    def __init__(
        self,
        inner: Reward,
        *,
        reward: RewardConfig,
        pool: Pool,
        builder: TreeBuilder,
        cache: ScoreCache | None,
        counts: Counts,
        closing: Callable[[], None] | None,
    ) -> None:
        self._inner = inner
        self._closing = closing
        self._pool = pool
        self._builder = builder
        self._cache = cache
        self._counts = counts
        self._num_workers = reward.num_workers
        self._tolerance = Tolerance(
            on_fault=reward.on_fault,
            share=reward.max_fault_share,
            outside_share=reward.max_outside_share,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Components that a score may hold, as far as they are known beforehand."""
        return self._inner.names

    @property
    def pids(self) -> list[int]:
        """Ids of the processes it has started."""
        return self._pool.pids

    def judge(self, groups: Sequence[Group], work: Judging | None = None) -> list[Scored]:
        """Every group with its scores, in order; those that the journal has are not judged anew.

        A validation is judged without normalising, so that its numbers can be compared over time.
        """
        is_validation = work is not None and work.purpose == VALIDATION
        with plainly(is_validation):
            scored = score_all(self._inner, groups, num_workers=self._num_workers, work=work)
            return run_loosely(scored)

    def advance(self, scored: Sequence[Scored]) -> None:
        """Count the values of a step that is done towards running normalisation.

        Call it once for each step, with all that was judged in it, wherever the scores came from:
        the values are read from the trees. The next step is normalised by what was counted so far.
        """
        self._builder.moments.add(values_seen(scored, self._builder.running))

    def state(self) -> dict[str, Any]:
        """What a resumed run must know, as JSON can hold it."""
        return {"running": self._builder.moments.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` gave; an empty one is the beginning."""
        self._builder.moments.restore(state.get("running", {}))

    def take_counts(self) -> dict[str, float]:
        """Requests, retries, faults and cache hits since the last time, by metric."""
        return self._counts.take()

    def check_sources(self, sources: Iterable[str]) -> None:
        """Raise a UserError, before anything is sampled, if some data source cannot be judged."""
        asked = list(sources)
        for routed in self._builder.routed:
            routed.check_sources(asked)

    def settle(self, scored: Sequence[Scored]) -> list[Rollout]:
        """The rollouts to leave out; a UserError when `reward.on_fault` says to stop instead."""
        return settle(scored, self._tolerance)

    def close(self) -> None:
        """End every process and what the run brought, close the cache. Twice is allowed."""
        self._pool.close()
        if self._closing is not None:
            self._closing()
        if self._cache is not None:
            self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
