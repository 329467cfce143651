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


def test_a_limit_on_the_search_is_kept(tmp_path: Path):
    limit = "algorithm.filter_groups.max_num_gen_batches=1"
    done = train(tmp_path, *FILTER, HALF_RIGHT, PAIRS, limit)
    assert done.course("group/generated_batches") == [1.0, 1.0]


@pytest.mark.parametrize("value", ["1", "2"])
def test_a_search_without_hope_ends_with_an_explanation(value: str, tmp_path: Path):
    same = tmp_path / "same.py"
    same.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1"
    )
    words = (*FILTER, f"reward.custom_reward_function.path={same}", f"trainer.seed={value}")
    with pytest.raises(UserError, match="no group of them has samples that score differently"):
        train(tmp_path / "runs", *words)
