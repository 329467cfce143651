"""Rollouts ahead of training: rows drawn again, runs that go on in another way, the window."""

import shutil
from pathlib import Path

import pytest

from luyen.base.digests import read_digests
from luyen.base.errors import UserError
from luyen.base.records import Rollout
from luyen.studio.doctor.record import read_run
from luyen.studio.replay.record import ReplayRecord
from luyen.telemetry.rollout_files import read_rollouts
from tests.runs import Ran, train

STEPS = 4
AHEAD = (
    "algorithm.rollout_correction.rollout_is=token",
    f"trainer.total_training_steps={STEPS}",
    "trainer.save_freq=2",
)
RARE = (
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.max_num_gen_batches=0",
    "algorithm.filter_groups.metric=reward",
    f"reward.custom_reward_function.path={Path(__file__).parent / 'rare_reward.py'}",
)
"""Some groups teach nothing, so that steps need more rows than a batch has."""


def ahead(folder: Path, staleness: int, order: str, *more: str) -> Ran:
    words = (f"trainer.max_staleness={staleness}", f"trainer.async_order={order}")
    return train(folder, *AHEAD, *words, *more)


def gone_on(folder: Path, staleness: int, order: str, *more: str) -> Ran:
    """The run from its checkpoint after step 2 on."""
    shutil.rmtree(folder / f"luyen/run/checkpoints/step_{STEPS:06d}")
    return ahead(folder, staleness, order, *more)


def chain(run: Ran) -> list[str]:
    return [line.chain for line in read_digests(run.root / "digests.jsonl")]


def rollouts(run: Ran, step: int) -> list[Rollout]:
    return [one.rollout for one in read_rollouts(run.root / f"rollouts/step_{step:06d}.parquet")]


def versions(run: Ran, step: int) -> set[int]:
    found = rollouts(run, step)
    return {v for r in found for b in r.branches for v in b.versions if v is not None}


@pytest.mark.parametrize("staleness", [1, 3])
def test_rows_drawn_again_are_drawn_by_weights_that_a_resumed_run_has_too(
    staleness: int, tmp_path: Path
):
    run = ahead(tmp_path, staleness, "submission", *RARE)
    expected = chain(run)
    assert run.course("group/generated_batches")[2] > 1, "nothing was drawn again"
    assert versions(run, 3) == {max(0, 2 - staleness), 2}
    assert chain(gone_on(tmp_path, staleness, "submission", *RARE)) == expected


@pytest.mark.parametrize("staleness", [1, 3])
def test_a_window_out_of_which_more_is_taken_never_runs_dry(staleness: int, tmp_path: Path):
    run = ahead(tmp_path, staleness, "completion", *RARE)
    assert max(run.course("group/generated_batches")) > 1, "nothing was drawn again"
    for step in range(1, STEPS + 1):
        assert min(versions(run, step)) >= step - 1 - staleness
    seen = [rollout.key for step in range(1, STEPS + 1) for rollout in rollouts(run, step)]
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "submission"), (2, "completion")),
        ((2, "completion"), (2, "submission")),
        ((2, "submission"), (1, "submission")),
        ((2, "completion"), (1, "completion")),
        ((2, "completion"), (0, "submission")),
        ((1, "submission"), (2, "submission")),
        ((0, "submission"), (2, "completion")),
    ],
)
def test_a_run_goes_on_with_another_order_or_staleness(
    before: tuple[int, str], after: tuple[int, str], tmp_path: Path
):
    ahead(tmp_path, *before)
    run = gone_on(tmp_path, *after)
    staleness, _ = after
    for step in range(3, STEPS + 1):
        assert len({rollout.key for rollout in rollouts(run, step)}) == 16
        assert min(versions(run, step)) >= step - 1 - staleness
        assert max(versions(run, step)) <= step - 1
    seen = [rollout.key for step in range(1, STEPS + 1) for rollout in rollouts(run, step)]
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize("order", ["submission", "completion"])
def test_rollouts_that_were_drawn_in_another_way_are_not_learned_from(order: str, tmp_path: Path):
    before = ahead(tmp_path, 2, order)
    assert max(rollout.response_length for rollout in rollouts(before, STEPS)) > 3
    run = gone_on(tmp_path, 2, order, "data.max_response_length=3")
    for step in range(3, STEPS + 1):
        assert max(rollout.response_length for rollout in rollouts(run, step)) <= 3


def test_no_row_is_lost_or_repeated_where_a_run_goes_on_with_less_staleness(tmp_path: Path):
    """Rows that were asked for and are too old now come before further ones."""
    ahead(tmp_path, 3, "submission")
    run = gone_on(tmp_path, 1, "submission", f"trainer.total_training_steps={STEPS + 2}")
    uids = [r.group.uid for step in range(1, STEPS + 3) for r in rollouts(run, step)]
    assert len(set(uids)) == 4 * (STEPS + 2)


def test_what_a_step_took_out_of_the_window_is_found_in_its_file(tmp_path: Path):
    """A group may have been asked for as one of another step."""
    run = ahead(tmp_path, 2, "completion")
    record = ReplayRecord(run.root)
    for step in range(1, STEPS + 1):
        assert len(record.step(step).rollouts) == 16
        path = run.root / f"rollouts/step_{step:06d}.parquet"
        assert len(read_rollouts(path, step=step)) == 16
        with pytest.raises(UserError, match=f"it holds rollouts of step {step}"):
            read_rollouts(path, step=step + 1)
    assert not read_run(run.root).damaged()
