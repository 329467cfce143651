"""A learned reward judges the rollouts of a run: in its process, and in a pool of its own."""

from pathlib import Path

import pytest

from tests.runs import Ran, train
from tests.unit.runtime.judges import saved_judge

POOL = "reward.reward_model"
OWN = (f"{POOL}.enable_resource_pool=true", f"{POOL}.nnodes=1", f"{POOL}.n_gpus_per_node=1")
JUDGED = ("reward/mean", "reward/reward_model/mean", "reward/std", "actor/pg_loss")


def with_judge(path: str) -> tuple[str, ...]:
    return (
        "reward.custom_reward_function.path=null",
        f"{POOL}.enable=true",
        f"{POOL}.model_path={path}",
    )


def judged(folder: Path, path: str, *words: str) -> Ran:
    ran = train(folder, *with_judge(path), *words)
    assert all(len(ran.course(name)) == 2 for name in JUDGED)
    return ran


def test_the_models_score_is_the_reward(tmp_path: Path):
    path = saved_judge(tmp_path / "judge")
    ran = judged(tmp_path / "here", path)
    assert ran.course("reward/mean") == ran.course("reward/reward_model/mean")
    assert min(ran.course("reward/std")) > 0


def test_it_is_one_component_beside_a_rule(tmp_path: Path):
    path = saved_judge(tmp_path / "judge")
    tree = "reward.components={taste: {model: reward_model, weight: 0.5}, right: {rule: exact}}"
    ran = train(tmp_path / "here", *with_judge(path), tree)
    numbers = [ran.course(f"reward/{name}mean") for name in ("", "taste/", "right/")]
    for total, taste, right in zip(*numbers, strict=True):
        assert total == pytest.approx(0.5 * taste + right)


@pytest.mark.slow  # the quick suite has copies in a pool of their own in tests/unit/runtime/ray
def test_a_pool_of_its_own_gives_the_same_rewards(tmp_path: Path):
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    path = saved_judge(tmp_path / "judge")
    here = judged(tmp_path / "here", path)
    there = judged(tmp_path / "there", path, "trainer.runtime=ray", *OWN)
    for name in ("reward/mean", "reward/std"):
        assert there.course(name)[0] == here.course(name)[0]
        assert there.course(name) == pytest.approx(here.course(name), rel=1e-3)
