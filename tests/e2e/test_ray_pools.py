"""Runs whose rollouts, reference or critic have devices of their own."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from luyen.checkpoint.store import CheckpointStore
from luyen.checkpoint.tensors import load_state
from tests.runs import ROLLOUT, Ran, same_weights, train

pytest.importorskip("ray", reason="the extra `ray` is not installed")


def nodes(*cores: int) -> Iterator[None]:
    """A cluster of nodes with so many cores each."""
    Cluster = pytest.importorskip("ray.cluster_utils").Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": cores[0]})
    for more in cores[1:]:
        found.add_node(num_cpus=more)
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_ADDRESS", found.address)
        yield
    found.shutdown()


@pytest.fixture
def two_nodes() -> Iterator[None]:
    """Nodes of one core each: what trains and what draws cannot lie on the same one."""
    yield from nodes(1, 1)


@pytest.fixture
def three_nodes() -> Iterator[None]:
    """Nodes of one core each: the actor with the rollouts, the reference and the critic."""
    yield from nodes(1, 1, 1)


@pytest.fixture
def five_cores() -> Iterator[None]:
    """Two ranks of the actor, two of the critic, and one of the reference."""
    yield from nodes(5)


def chains(run: Ran) -> list[str]:
    """The chain of digests up to each step, as its checkpoint notes it."""
    store = CheckpointStore(run.root / "checkpoints")
    assert store.list() == (1, 2, 3)
    return [store.load(step).facts["chain"] for step in store.list()]


@pytest.mark.slow  # a minute of two cores; tests/unit/runtime/ray places pools in seconds
@pytest.mark.usefixtures("two_nodes")
def test_rollouts_of_another_node_and_checkpoints_beside_change_nothing(tmp_path: Path):
    words = ("trainer.total_training_steps=3", "trainer.save_freq=1")
    here = train(tmp_path / "here", *words)
    split = (f"{ROLLOUT}.nnodes=1", "trainer.async_save=true")
    there = train(tmp_path / "there", *words, *split)
    assert chains(there) == chains(here)
    assert same_weights(here, there)


PPO = (
    "algorithm.adv_estimator=gae",
    "critic.optim.lr=1.0e-3",
    f"{ROLLOUT}.n=2",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "trainer.save_freq=1",
)
APART = ("critic.nnodes=1", "actor_rollout_ref.ref.nnodes=1", "trainer.async_save=true")


def critic(run: Ran) -> dict[str, torch.Tensor]:
    """The critic's weights after the last step."""
    return load_state(run.root / "checkpoints/step_000003", "critic")


@pytest.mark.slow  # two runs of four processes, a minute of two cores
@pytest.mark.usefixtures("three_nodes")
def test_a_reference_and_a_critic_on_other_nodes_change_nothing(tmp_path: Path):
    """Resumed, too: both groups of ranks load the checkpoint that both have written."""
    here = train(tmp_path / "here", *PPO, "trainer.total_training_steps=3")
    train(tmp_path / "there", *PPO, *APART, "trainer.total_training_steps=2")
    there = train(tmp_path / "there", *PPO, *APART, "trainer.total_training_steps=3")
    assert chains(there) == chains(here)
    assert same_weights(here, there)
    assert all(torch.equal(weight, critic(there)[name]) for name, weight in critic(here).items())


@pytest.mark.slow  # two runs of up to six processes, two minutes of two cores
@pytest.mark.usefixtures("five_cores")
def test_two_ranks_of_a_critic_in_a_pool_of_its_own_compute_what_shared_ones_do(tmp_path: Path):
    """The reference has one rank: its log-probabilities do not depend on their number."""
    words = ("trainer.n_gpus_per_node=2", f"{ROLLOUT}.data_parallel_size=1")
    words = (*PPO, *words, "trainer.total_training_steps=3")
    here = train(tmp_path / "here", *words)
    there = train(tmp_path / "there", *words, *APART, "actor_rollout_ref.ref.n_gpus_per_node=1")
    assert chains(there) == chains(here)
    assert same_weights(here, there)
