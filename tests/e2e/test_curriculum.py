"""A curriculum that looks at the policy is fed by the loop and survives a resume."""

from pathlib import Path

from luyen.checkpoint.store import CheckpointStore
from luyen.checkpoint.tensors import load_state
from tests.runs import Ran, same_weights, train

ROWS = "data.train_files=arithmetic://sum?digits=2&size=200"
CURRICULUM = (
    ROWS,
    "data.sampler.name=curriculum",
    "data.sampler.kwargs={key: difficulty, stages: 3, promote_at: 0.01}",
)
STEPS = "trainer.total_training_steps=4"
EASY = f"reward.custom_reward_function.path={Path(__file__).parent / 'half_right_reward.py'}"


def sampler_state(ran: Ran) -> list[int]:
    newest = CheckpointStore(ran.root / "checkpoints").newest_sound()
    assert newest is not None
    return list(load_state(newest.path, "loop")["sampler"])


def test_success_begins_the_next_stage(tmp_path: Path):
    done = train(tmp_path, *CURRICULUM, STEPS, EASY)
    # A batch is 4 prompts: promoted after the first and after the second step, then at the last.
    assert sampler_state(done) == [2, 8]
    lengths = done.course("prompt_length/mean")
    assert lengths[0] < max(lengths[2:])


def test_without_success_the_first_stage_goes_on(tmp_path: Path):
    done = train(tmp_path, *CURRICULUM, STEPS)
    assert sampler_state(done) == [0, 0]


def test_a_resumed_curriculum_stands_where_it_stood(tmp_path: Path):
    whole = train(tmp_path / "whole", *CURRICULUM, STEPS, EASY)
    train(tmp_path / "parts", *CURRICULUM, "trainer.total_training_steps=2", EASY)
    resumed = train(tmp_path / "parts", *CURRICULUM, STEPS, EASY)
    assert resumed.metrics == whole.metrics
    assert sampler_state(resumed) == sampler_state(whole)
    assert same_weights(resumed, whole)
