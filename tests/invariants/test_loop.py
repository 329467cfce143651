"""What must not change the course of a run, and what must."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from luyen.engine.actor import ActorEngine
from luyen.engine.batch import MicroBatching, PackedBatch
from luyen.train.advantages import compute_advantages
from luyen.train.batch import compute_logprobs, pack_groups, parity_metrics
from luyen.train.loop import train_online
from luyen.train.run import OnlineRun
from luyen.train.scoring import generate_and_score
from tests.runs import (
    ACTOR,
    MODEL,
    ROLLOUT,
    Ran,
    close,
    prepare,
    read_back,
    same_weights,
    train,
    worker_of,
)

STEPS = "trainer.total_training_steps=4"
OFF_POLICY = (f"{ACTOR}.ppo_mini_batch_size=2", f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.shuffle=true")
WITH_KL = (f"{ACTOR}.use_kl_loss=true", "algorithm.use_kl_in_reward=true")
PPO = ("algorithm.adv_estimator=gae", "critic.optim.lr=1.0e-3", f"{ROLLOUT}.n=2")
VALIDATED = (
    "data.val_files=arithmetic://sum?digits=1&split=held-out",
    "trainer.test_freq=3",
)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return train(tmp_path_factory.mktemp("plain"), STEPS, *VALIDATED)


@pytest.fixture
def run(tmp_path: Path):
    made = prepare(tmp_path)
    yield made
    close(made)


def credited(run: OnlineRun) -> PackedBatch:
    """The batch of the first step, ready for its update."""
    batch = compute_logprobs(
        pack_groups(generate_and_score(run, 1).groups), run.roles, run.rules.needs
    )
    return compute_advantages(batch, run.rules.advantage_config, kl_coef=0.0).batch


def gradient(
    run: OnlineRun, batch: PackedBatch, passes: MicroBatching, *, aggregation: str | None = None
) -> Tensor:
    """The gradient that an optimizer step on the batch would see, as one vector."""
    actor = worker_of(run).actor
    engine = ActorEngine(actor.policy, _Kept(actor.optimizer), passes, temperature=1.0)
    objective = run.rules.objective
    wanted = replace(objective, aggregation=aggregation or objective.aggregation)
    engine.update(batch, wanted, lr=0.0, seed=0)
    return engine.optimizer.gradient


class _Kept:
    """Stands in for the optimizer: keeps the gradient and leaves the weights alone."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.gradient = torch.empty(0)

    def step(self, lr: float) -> Any:
        masters = self.optimizer.masters
        self.gradient = torch.cat([m.grad.flatten() for m in masters if m.grad is not None])
        self.optimizer.zero_grad()
        return None


def test_the_same_seed_gives_the_same_metrics_and_weights(plain: Ran, tmp_path: Path):
    again = train(tmp_path, STEPS, *VALIDATED)
    assert again.metrics == plain.metrics
    assert same_weights(again, plain)
    assert plain.course("actor/grad_norm")[0] > 0
    assert [int(m["step"]) for m in plain.metrics] == [0, 1, 2, 3, 4]


def test_another_seed_gives_another_run(plain: Ran, tmp_path: Path):
    other = train(tmp_path, STEPS, *VALIDATED, "trainer.seed=1")
    assert other.course("reward/mean") != plain.course("reward/mean")
    assert not same_weights(other, plain)


@pytest.mark.parametrize(
    "overrides",
    [
        (f"{ROLLOUT}.max_num_seqs=4",),
        (f"{ROLLOUT}.max_num_seqs=5", f"{ROLLOUT}.max_num_batched_tokens=32"),
    ],
)
def test_how_generation_is_batched_changes_nothing_at_all(
    overrides: tuple[str, ...], plain: Ran, tmp_path: Path
):
    other = train(tmp_path, STEPS, *VALIDATED, *overrides)
    assert other.metrics == plain.metrics
    assert same_weights(other, plain)


def test_rollouts_that_finish_in_another_order_make_the_same_batch(run: OnlineRun):
    groups = generate_and_score(run, 1).groups
    turned = [replace(g, rollouts=g.rollouts[::-1]) for g in reversed(groups)]
    one, other = pack_groups(groups), pack_groups(turned)
    assert torch.equal(one.tokens, other.tokens)
    assert all(torch.equal(one.streams[name], other.streams[name]) for name in one.streams)


@pytest.mark.parametrize(
    "passes",
    [MicroBatching(sequences=1), MicroBatching(sequences=3), MicroBatching(max_tokens=64)],
    ids=repr,
)
@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_micro_batches_do_not_change_the_gradient(
    passes: MicroBatching, aggregation: str, run: OnlineRun
):
    batch = credited(run)
    whole = gradient(run, batch, MicroBatching(max_tokens=10_000), aggregation=aggregation)
    cut = gradient(run, batch, passes, aggregation=aggregation)
    assert whole.norm() > 0
    assert (cut - whole).norm() < 1e-6 * whole.norm()


@pytest.mark.parametrize("overrides", [(), OFF_POLICY, PPO, (f"{MODEL}.lora_rank=4", *WITH_KL)])
def test_trainer_and_sampler_agree_to_the_last_bit_at_every_step(
    overrides: tuple[str, ...], tmp_path: Path
):
    done = train(tmp_path, STEPS, *overrides)
    assert done.course("parity/max_gap") == [0.0] * 4
    assert done.course("parity/exact_fraction") == [1.0] * 4


@pytest.mark.parametrize("overrides", [(), OFF_POLICY])
def test_a_weight_that_changes_after_sampling_shows_as_a_gap(
    overrides: tuple[str, ...], tmp_path: Path
):
    run = prepare(tmp_path, *overrides)
    batch = pack_groups(generate_and_score(run, 1).groups)
    with torch.no_grad():
        next(iter(worker_of(run).actor.policy.parameters()))[50, 0] += 1e-3
    batch = compute_logprobs(batch, run.roles, run.rules.needs)
    ready = compute_advantages(batch, run.rules.advantage_config, kl_coef=0.0).batch
    done = run.roles.update_actor(ready, run.rules.objective, lr=0.0, seed=0).result()
    found = {**done.metrics, **parity_metrics(batch, run.rules.needs)}
    assert found["parity/max_gap"] > 0
    close(run)


@pytest.mark.parametrize(
    "overrides",
    [VALIDATED, (*OFF_POLICY, *WITH_KL, "algorithm.kl_ctrl.type=adaptive"), PPO],
    ids=["plain", "off-policy with KL", "critic"],
)
def test_a_run_that_was_interrupted_and_resumed_is_the_run_that_was_not(
    overrides: tuple[str, ...], tmp_path: Path
):
    whole = train(tmp_path / "whole", STEPS, *overrides)
    interrupt_after(2, prepare(tmp_path / "parts", STEPS, *overrides))
    resumed = train(tmp_path / "parts", STEPS, *overrides)
    assert resumed.metrics == whole.metrics
    assert same_weights(resumed, whole)


def interrupt_after(steps: int, run: OnlineRun) -> None:
    """Carry out a run that is asked to end in the middle of one of its steps."""
    update = run.roles.update_actor

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        run.interruption.is_wanted = run.step + 1 == steps
        return update(*args, **kwargs)

    run.roles.update_actor = interrupted  # type: ignore[method-assign]
    train_online(run)
    close(run)
    assert run.step == steps
    assert int(read_back(run.recorder.directory.root).metrics[-1]["step"]) == steps


@pytest.mark.parametrize("overrides", [(), (*OFF_POLICY, *WITH_KL), PPO])
def test_what_stands_on_masked_tokens_reaches_nothing(overrides: tuple[str, ...], tmp_path: Path):
    run = prepare(tmp_path, *overrides)
    clean = compute_logprobs(
        pack_groups(generate_and_score(run, 1).groups), run.roles, run.rules.needs
    )
    mask = clean.layout.mask
    dirty = replace(clean, streams={n: with_garbage(s, mask) for n, s in clean.streams.items()})
    assert not any(torch.equal(dirty.streams[n], s) for n, s in clean.streams.items())
    one, other = (
        compute_advantages(b, run.rules.advantage_config, kl_coef=0.1) for b in (clean, dirty)
    )
    assert one.metrics == other.metrics
    assert torch.equal(one.batch.streams["advantages"], other.batch.streams["advantages"])
    again = replace(
        other.batch,
        streams={n: with_garbage(s, mask) for n, s in other.batch.streams.items()},
    )
    passes = MicroBatching(sequences=3)
    assert torch.equal(gradient(run, one.batch, passes), gradient(run, again, passes))
    critic = worker_of(run).critic
    if critic is not None:
        losses = [critic.update(b, lr=0.0).metrics for b in (one.batch, again)]
        assert losses[0] == losses[1]
        assert losses[0]["critic/vf_loss"] > 0
    close(run)


def with_garbage(stream: Tensor, mask: Tensor) -> Tensor:
    """The stream with NaN, or a wild number, wherever no token trains."""
    garbage = torch.nan if stream.is_floating_point() else -999
    return torch.where(mask, stream, garbage)


def test_a_directory_that_is_used_again_holds_the_configuration_of_now(tmp_path: Path):
    first = train(tmp_path, "trainer.total_training_steps=1")
    assert "total_training_steps: 1" in (first.root / "config.yaml").read_text()
    train(tmp_path, "trainer.total_training_steps=2")
    assert "total_training_steps: 2" in (first.root / "config.yaml").read_text()
