"""A run on Ray whose rollout engine is divided over two ranks."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from luyen.telemetry.rollout_files import read_rollouts
from tests.foreign_models import mixture
from tests.runs import ROLLOUT, Ran, train

ray = pytest.importorskip("ray", reason="the extra `ray` is not installed")
FSDP = "actor_rollout_ref.actor.fsdp_config"
TWO = ("trainer.n_gpus_per_node=2", f"{ROLLOUT}.tensor_model_parallel_size=2")


@pytest.fixture(autouse=True)
def on_the_cluster(cluster_address: str) -> Iterator[None]:
    """A run connects to it, and leaves it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("RAY_ADDRESS", cluster_address)
        yield


def first_rollouts(run: Ran) -> list[tuple[int, ...]]:
    return [
        tuple(one.rollout.tokens)
        for one in read_rollouts(run.root / "rollouts/step_000001.parquet")
    ]


def test_two_ranks_generate_and_train_as_one_process(tmp_path: Path):
    """Layers are divided alike on both sides, so that the gap between them stays zero."""
    demand_same_run(tmp_path)


def test_two_ranks_share_the_experts_of_both_sides(tmp_path: Path):
    model = f"actor_rollout_ref.model.path={mixture(tmp_path / 'model')}"
    balanced = "actor_rollout_ref.actor.router_aux_loss_coef=0.01"
    replayed = f"{ROLLOUT}.enable_rollout_routing_replay=true"
    run = demand_same_run(tmp_path, model, balanced, replayed)
    assert run.course("router/changed_routes")[0] == 0.0


def demand_same_run(folder: Path, *words: str) -> Ran:
    here = train(folder / "here", *words)
    there = train(folder / "there", *words, *TWO, f"{FSDP}.tensor_parallel_size=2")
    assert first_rollouts(here) == first_rollouts(there)
    for one, other in zip(here.metrics, there.metrics, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm"):
            assert other[name] == pytest.approx(one[name], rel=2e-4, abs=1e-5), name
        assert other["parity/max_gap"] == 0.0
    return there


def test_ranks_generate_while_whole_layers_learn(tmp_path: Path):
    """Sums of both sides are made in another order, which adds little to what staleness does."""
    ahead = ("trainer.max_staleness=1", "algorithm.rollout_correction.rollout_is=token")
    there = train(tmp_path / "there", *TWO, *ahead).course("parity/max_gap")
    whole = train(tmp_path / "whole", TWO[0], *ahead).course("parity/max_gap")
    assert 0.0 <= there[0] < 1e-4, "the first rollouts are of the weights that learn"
    assert there == pytest.approx(whole, abs=1e-4)
    assert there[-1] > 1e-2, "later ones are a step older"
