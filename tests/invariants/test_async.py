"""Generation that runs ahead of training: the same batches whatever the clock does."""

import json
import shutil
from pathlib import Path

import pytest

from luyen.base.digests import read_digests
from luyen.checkpoint.tensors import load_state
from luyen.studio.replay.record import ReplayRecord
from luyen.studio.replay.replay import replay_rollout, replay_step
from luyen.telemetry.rollout_files import read_rollouts
from tests.runs import CHATTY, ROLLOUT, Ran, train

CORRECTED = "algorithm.rollout_correction.rollout_is=token"
FEW = f"{ROLLOUT}.max_num_seqs=4"
STEPS = 6
LENGTH = f"trainer.total_training_steps={STEPS}"
FILTERED = (
    "algorithm.filter_groups.enable=true",
    "algorithm.filter_groups.max_num_gen_batches=0",
    "algorithm.filter_groups.metric=reward",
)
KINDS = {
    "answers": (),
    "conversations": CHATTY,
    "groups that are drawn again": FILTERED,
    "greedy baselines": ("algorithm.adv_estimator=remax",),
    "adapters": ("actor_rollout_ref.model.lora_rank=4",),
    "a critic": ("algorithm.adv_estimator=gae", "critic.optim.lr=1.0e-3"),
}


def ahead(folder: Path, staleness: int, kind: str, *more: str) -> Ran:
    words = (*KINDS[kind], CORRECTED, LENGTH, f"trainer.max_staleness={staleness}", *more)
    return train(folder, *words)


def chain(run: Ran) -> list[str]:
    lines = (run.root / "digests.jsonl").read_text().splitlines()
    return [json.loads(line)["chain"] for line in lines]


def rollouts(run: Ran, step: int):
    return [one.rollout for one in read_rollouts(run.root / f"rollouts/step_{step:06d}.parquet")]


def versions(rollout) -> set[int]:
    return {v for branch in rollout.branches for v in branch.versions if v is not None}


@pytest.fixture(scope="module", params=[1, 4])
def staleness(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.fixture(scope="module")
def talks(staleness: int, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Conversations whose tools take a random time."""
    return ahead(tmp_path_factory.mktemp("talks"), staleness, "conversations")


TOGETHER = [
    pytest.param(
        kind, staleness, marks=[] if staleness == 1 or kind == "answers" else pytest.mark.slow
    )
    for staleness in (1, 4)
    for kind in sorted(set(KINDS) - {"conversations"})
]
"""Each kind one step ahead; four steps ahead the scheduler does the same for all of them."""


@pytest.mark.parametrize(("kind", "staleness"), TOGETHER, indirect=["staleness"])
def test_the_same_seed_gives_the_same_run_whatever_is_drawn_together(
    kind: str, staleness: int, tmp_path: Path
):
    one = ahead(tmp_path / "one", staleness, kind)
    other = ahead(tmp_path / "other", staleness, kind, FEW)
    assert chain(one) == chain(other)


def test_the_same_seed_gives_the_same_run_whatever_takes_long(
    talks: Ran, staleness: int, tmp_path: Path
):
    assert chain(ahead(tmp_path, staleness, "conversations", FEW)) == chain(talks)


def test_every_rollout_of_a_step_is_drawn_by_the_version_that_belongs_to_it(
    talks: Ran, staleness: int
):
    for step in range(1, STEPS + 1):
        found = rollouts(talks, step)
        assert {rollout.group.step for rollout in found} == {step}
        assert set().union(*map(versions, found)) == {max(0, step - 1 - staleness)}


def test_the_first_steps_are_those_of_a_run_in_turns(talks: Ran, staleness: int, tmp_path: Path):
    """They are drawn by the first weights, and the very first is trained on by them."""
    turns = ahead(tmp_path, 0, "conversations", "trainer.total_training_steps=1")
    mine, theirs = (read_digests(run.root / "digests.jsonl")[0].stages for run in (talks, turns))
    assert {**mine, "metrics": ""} == {**theirs, "metrics": ""}, "only one of them has a staleness"
    del staleness


def test_a_checkpoint_holds_what_was_asked_for_and_a_run_goes_on_from_it(
    talks: Ran, staleness: int, tmp_path: Path
):
    saving = ahead(tmp_path, staleness, "conversations", "trainer.save_freq=2")
    assert chain(saving) == chain(talks)
    loop = load_state(saving.root / "checkpoints/step_000002", "loop")
    assert [one["step"] for one in loop["asked"]] == list(range(3, min(STEPS, 2 + staleness) + 1))
    for step in (4, 6):
        shutil.rmtree(saving.root / f"checkpoints/step_{step:06d}")
    again = ahead(tmp_path, staleness, "conversations", "trainer.save_freq=2")
    assert chain(again) == chain(talks)


def test_a_step_and_a_rollout_of_it_are_replayed_from_files(talks: Ran):
    record = ReplayRecord(talks.root)
    again = replay_step(record, 5, silent)
    assert again.numbers["actor/pg_loss"].after == again.numbers["actor/pg_loss"].before
    wanted = rollouts(talks, 5)[0]
    assert replay_rollout(record, 5, f"{wanted.group}/{wanted.sample}", silent).is_equal


def silent(*_: object) -> None:
    """Nobody watches."""


def test_in_order_of_completion_no_rollout_is_too_old_and_none_is_used_twice(
    staleness: int, tmp_path: Path
):
    run = ahead(tmp_path, staleness, "conversations", "trainer.async_order=completion")
    seen: list[tuple] = []
    for step in range(1, STEPS + 1):
        found = rollouts(run, step)
        assert len(found) == 16
        for rollout in found:
            assert min(versions(rollout)) >= step - 1 - staleness
            assert max(versions(rollout)) <= step - 1
        seen += [rollout.key for rollout in found]
    assert len(set(seen)) == len(seen) == STEPS * 16


def test_in_order_of_completion_a_run_goes_on_with_what_was_finished(
    staleness: int, tmp_path: Path
):
    words = ("trainer.async_order=completion", "trainer.save_freq=3")
    run = ahead(tmp_path, staleness, "conversations", *words)
    shutil.rmtree(run.root / "checkpoints/step_000006")
    again = ahead(tmp_path, staleness, "conversations", *words)
    assert again.course("step") == [float(step) for step in range(1, STEPS + 1)]
    assert all(len(rollouts(again, step)) == 16 for step in range(1, STEPS + 1))
