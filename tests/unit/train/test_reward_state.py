"""Running statistics of the reward survive a kill: a resumed run has the same chain."""

from pathlib import Path

from luyen.base.digests import read_digests
from tests.runs import train

TREE = (
    "reward.custom_reward_function.path=null",
    "reward.components={loops: {rule: repetition, normalise: running, kwargs: {ngram: 1}}, "
    "brief: {rule: length, weight: 0.1, normalise: running}}",
)


def chain(root: Path) -> list[str]:
    return [line.chain for line in read_digests(root / "digests.jsonl")]


def test_a_resumed_run_normalises_as_one_that_was_not_stopped(tmp_path: Path):
    saved = ("trainer.save_freq=2",)
    whole = train(tmp_path / "whole", *TREE, *saved, "trainer.total_training_steps=4")
    train(tmp_path / "cut", *TREE, *saved, "trainer.total_training_steps=2")
    resumed = train(tmp_path / "cut", *TREE, *saved, "trainer.total_training_steps=4")
    assert chain(resumed.root) == chain(whole.root)
    assert len(chain(whole.root)) == 4
    # Later steps are normalised: what counts is not what was judged.
    judged, counted = (whole.course(f"reward/loops/{name}") for name in ("raw_mean", "mean"))
    assert len(judged) == 3
    assert judged != counted[1:]
