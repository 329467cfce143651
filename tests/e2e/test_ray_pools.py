"""A run whose rollouts have devices of their own, and whose checkpoints are written beside it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from luyen.checkpoint.store import CheckpointStore
from tests.runs import ROLLOUT, Ran, train

pytest.importorskip("ray", reason="the extra `ray` is not installed")


@pytest.fixture(autouse=True)
def two_nodes() -> Iterator[None]:
    """Nodes of one core each: what trains and what draws cannot lie on the same one."""
    Cluster = pytest.importorskip("ray.cluster_utils").Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    found.add_node(num_cpus=1)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_ADDRESS", found.address)
        yield
    found.shutdown()


def chains(run: Ran) -> list[str]:
    """The chain of digests up to each step, as its checkpoint notes it."""
    store = CheckpointStore(run.root / "checkpoints")
    assert store.list() == (1, 2, 3)
    return [store.load(step).facts["chain"] for step in store.list()]


@pytest.mark.slow  # a minute of two cores; tests/unit/runtime/ray places pools in seconds
def test_rollouts_of_another_node_and_checkpoints_beside_change_nothing(tmp_path: Path):
    words = ("trainer.total_training_steps=3", "trainer.save_freq=1")
    here = train(tmp_path / "here", *words)
    split = (f"{ROLLOUT}.nnodes=1", "trainer.async_save=true")
    there = train(tmp_path / "there", *words, *split)
    assert chains(there) == chains(here)
    assert here.weights.keys() == there.weights.keys()
    assert all(torch.equal(weight, there.weights[name]) for name, weight in here.weights.items())
