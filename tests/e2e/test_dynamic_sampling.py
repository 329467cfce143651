"""Groups that teach nothing are drawn anew, and a search that cannot succeed ends."""

from pathlib import Path

import pytest

from luyen.base.errors import UserError
from tests.runs import train

FILTER = ("algorithm.filter_groups.enable=true", "algorithm.filter_groups.metric=score")
HALF_RIGHT = f"reward.custom_reward_function.path={Path(__file__).parent / 'half_right_reward.py'}"
PAIRS = "actor_rollout_ref.rollout.n=2"


def test_groups_of_one_score_are_replaced(tmp_path: Path):
    done = train(tmp_path, *FILTER, HALF_RIGHT, PAIRS)
    assert done.course("group/zero_std_fraction") == [0.0, 0.0]
    assert max(done.course("group/generated_batches")) > 1
    assert all(0 < share < 1 for share in done.course("group/kept_fraction"))


def test_without_the_filter_such_groups_are_trained_on(tmp_path: Path):
    done = train(tmp_path, HALF_RIGHT, PAIRS)
    assert max(done.course("group/zero_std_fraction")) > 0
    assert done.course("group/generated_batches") == [1.0, 1.0]


def test_a_step_that_the_allowed_batches_do_not_fill_stops_the_run(tmp_path: Path):
    free = train(tmp_path / "free", *FILTER, HALF_RIGHT, PAIRS).course("group/generated_batches")
    enough = int(max(free))
    assert enough > 1
    limit = "algorithm.filter_groups.max_num_gen_batches"
    done = train(tmp_path / "enough", *FILTER, HALF_RIGHT, PAIRS, f"{limit}={enough}")
    assert done.course("group/generated_batches") == free
    few = f"{enough - 1} batches were generated and [1-3] of the 4 groups of a step have samples"
    with pytest.raises(UserError, match=few) as caught:
        train(tmp_path / "few", *FILTER, HALF_RIGHT, PAIRS, f"{limit}={enough - 1}")
    assert (caught.value.field, caught.value.value) == (limit, enough - 1)


def test_a_limit_without_the_filter_has_no_effect(tmp_path: Path):
    limit = "algorithm.filter_groups.max_num_gen_batches=1"
    done = train(tmp_path, HALF_RIGHT, PAIRS, limit)
    assert done.course("group/generated_batches") == [1.0, 1.0]


@pytest.mark.parametrize("on_fault", ["fail", "drop"])
def test_a_baseline_that_cannot_be_computed_follows_the_policy_for_faults(
    on_fault: str, tmp_path: Path
):
    broken = tmp_path / "broken.py"
    broken.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    if int(ground_truth) % 2:\n"
        "        raise TimeoutError('too late')\n"
        "    return float(len(solution_str))\n"
    )
    words = [f"reward.custom_reward_function.path={broken}", f"reward.on_fault={on_fault}"]
    words += ["algorithm.adv_estimator=remax", "actor_rollout_ref.rollout.n=1"]
    words += ["data.train_batch_size=16", "actor_rollout_ref.actor.ppo_mini_batch_size=16"]
    if on_fault == "fail":
        with pytest.raises(UserError, match="too late"):
            train(tmp_path / "runs", *words)
        return
    done = train(tmp_path / "runs", *words)
    faults, kept = done.course("reward/faults"), done.course("group/kept_fraction")
    assert max(faults) > 0
    assert kept == [1 - count / 16 for count in faults]


@pytest.mark.parametrize("value", ["1", "2"])
def test_a_search_without_hope_ends_with_an_explanation(value: str, tmp_path: Path):
    same = tmp_path / "same.py"
    same.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1"
    )
    words = (*FILTER, f"reward.custom_reward_function.path={same}", f"trainer.seed={value}")
    with pytest.raises(UserError, match="no group of them has samples that score differently"):
        train(tmp_path / "runs", *words)
