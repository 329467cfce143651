"""Drawing ahead of training: the policy still learns the quickstart."""

from pathlib import Path

import pytest

from tests.e2e.recipes import RECIPES
from tests.runs import train

pytestmark = pytest.mark.slow
STEPS = 40
GAIN = 0.2


@pytest.mark.parametrize(
    ("staleness", "order"), [(1, "submission"), (4, "submission"), (4, "completion")]
)
def test_the_quickstart_is_learned_from_rollouts_of_older_weights(
    staleness: int, order: str, tmp_path: Path
):
    done = train(
        tmp_path,
        f"trainer.max_staleness={staleness}",
        f"trainer.async_order={order}",
        "algorithm.rollout_correction.rollout_is=token",
        f"trainer.total_training_steps={STEPS}",
        "trainer.test_freq=-1",
        "trainer.logger=jsonl",
        files=[RECIPES["quickstart"]],
    )
    before, *_, after = done.course("val/accuracy")
    print(f"staleness {staleness}, {order}: {before:.3f} -> {after:.3f}")
    assert after > before + GAIN
