"""Recipes on Ray with two ranks and two replicas: the same rollouts, losses and scores."""

import pytest

from luyen.studio.replay.record import ReplayRecord
from luyen.studio.replay.replay import replay_rollout, replay_step
from luyen.telemetry.rollout_files import read_rollouts
from tests.e2e.recipes import RECIPES
from tests.runs import ROLLOUT, Ran, train

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
pytestmark = pytest.mark.slow
CLUSTER = ("trainer.n_gpus_per_node=2", f"{ROLLOUT}.data_parallel_size=2")
STEPS = 8
CHECKED = (2, 5, 8)
"""Steps whose rollouts and losses are made again in one process."""
WORDS = (
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=1",
    "trainer.test_freq=-1",
    "trainer.logger=jsonl",
)


@pytest.fixture(scope="module", params=["quickstart", "tool_calling"])
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A recipe in this process, and on a cluster of its own."""
    files = [RECIPES[request.param]]
    here = train(tmp_path_factory.mktemp("here"), *WORDS, files=files)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_ADDRESS", "local")
        there = train(tmp_path_factory.mktemp("there"), *WORDS, *CLUSTER, files=files)
    return here, there


def rollouts(run: Ran, step: int):
    return [one.rollout for one in read_rollouts(run.root / f"rollouts/step_{step:06d}.parquet")]


def timeless(rollout):
    return rollout.tokens, rollout.logps, rollout.stop, rollout.text, rollout.score


def silent(*_: object) -> None:
    """Nobody watches."""


def test_the_first_step_draws_the_same_rollouts_to_the_bit(runs: tuple[Ran, Ran]):
    here, there = (list(map(timeless, rollouts(run, 1))) for run in runs)
    assert here == there


@pytest.mark.parametrize("step", CHECKED)
def test_later_rollouts_are_those_of_a_local_engine_with_the_same_weights(
    runs: tuple[Ran, Ran], step: int
):
    record = ReplayRecord(runs[1].root)
    drawn = rollouts(runs[1], step)
    for rollout in drawn[:: len(drawn) // 16]:
        again = replay_rollout(record, step, f"{rollout.group}/{rollout.sample}", silent)
        assert again.is_equal, rollout.group


@pytest.mark.parametrize("step", CHECKED)
def test_on_recorded_batches_one_process_finds_the_same(runs: tuple[Ran, Ran], step: int):
    again = replay_step(ReplayRecord(runs[1].root), step, silent)
    loss, norm = again.numbers["actor/pg_loss"], again.numbers["actor/grad_norm"]
    assert loss.after == pytest.approx(loss.before, abs=1e-6, rel=0)
    assert norm.after == pytest.approx(norm.before, rel=1e-5)


def test_the_gap_between_trainer_and_sampler_stays_zero(runs: tuple[Ran, Ran]):
    assert set(runs[1].course("parity/max_gap")) == {0.0}


def test_the_final_score_is_that_of_one_process_within_noise(runs: tuple[Ran, Ran]):
    """Each lies in the 95 % interval of the other, and both have learned."""
    here, there = (run.metrics[-1] for run in runs)
    for one, other in ((here, there), (there, here)):
        assert one["val/accuracy_low"] <= other["val/accuracy"] <= one["val/accuracy_high"]
    assert there["val/accuracy"] > runs[1].metrics[0]["val/accuracy"] + 0.05
