"""The reward model in a pool of its own: the same bits as here, also after a copy was lost."""

import asyncio
import os
import signal
import time
from functools import partial
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.rewards.reward_model import LearnedReward
from luyen.runtime.ray.cluster import connect
from luyen.runtime.ray.pools import PoolFacts, plan_pools
from luyen.runtime.reward_model import open_learned_reward
from tests.unit.runtime.judges import groups, renderer, saved_judge, scorer_of, settings
from tests.unit.runtime.ray.test_cluster import living

pytest.importorskip("ray", reason="the extra `ray` is not installed")
GONE_S = 30.0


def judged(reward: LearnedReward) -> list[float | None]:
    found = asyncio.run(reward.score_step(groups()))
    return [score.value for row in found for score in row]


def unloadable() -> None:
    raise UserError("reward.reward_model.model_path", "x", "it cannot be loaded", "mend it")


def test_copies_in_their_own_pool_score_as_one_model_here(tmp_path: Path, cluster_address: str):
    path = saved_judge(tmp_path)
    start = partial(scorer_of, path)
    here = open_learned_reward(settings(path), renderer(), start)
    expected = judged(here)
    here.close()
    connection = connect(cluster_address, threads=1)
    try:
        from luyen.runtime.ray.actors import PlacedPools
        from luyen.runtime.ray.reward_model import RayScorer

        facts = PoolFacts(device="cpu", nnodes=1, per_node=1, replicas=1, reward=(1, 2))
        pools = plan_pools(facts, connection.nodes())
        assert [pool.name for pool in pools.pools] == ["reward model", "shared"]
        placed = PlacedPools(pools)
        places = [placed.options(slot) for slot in pools.slots["reward model"]]
        scorer = RayScorer(start, places=places)
        reward = open_learned_reward(settings(path), renderer(), lambda: scorer)
        assert judged(reward) == expected
        first, second = scorer.pids
        os.kill(second, signal.SIGKILL)
        assert judged(reward) == expected, "begun again, to the same bits"
        assert scorer.restarts == 1
        assert scorer.pids[0] == first
        pids = set(scorer.pids)
        reward.close()
        reward.close()
        last = time.monotonic() + GONE_S
        while living(pids) and time.monotonic() < last:
            time.sleep(0.1)
        assert living(pids) == set()
        with pytest.raises(UserError, match="it cannot be loaded"):
            RayScorer(unloadable, places=places[:1])
        placed.free()
    finally:
        connection.disconnect()
