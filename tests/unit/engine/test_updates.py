"""Optimizer steps: the gradient is right, and neither micro-batches nor garbage change it."""

import pytest
import torch

from luyen.algorithms.objective import Objective
from luyen.engine.actor import gap_metrics, score
from luyen.engine.batch import MicroBatching, pack
from luyen.engine.optim import MasterOptimizer
from luyen.engine.supervised import SupervisedEngine, TokenAggregation
from tests.tiny_models import tiny_policy
from tests.unit.engine.steps import OPTIM, PASSES, actor, critic, recorded, whole

OBJECTIVES = {
    "vanilla": Objective(loss="vanilla"),
    "everything": Objective(
        loss="gspo", entropy_coeff=0.01, kl_loss_coef=0.1, aggregation="seq-mean-token-mean"
    ),
    "chooses over the step": Objective(loss="clip_cov"),
}


def gradient(engine, update) -> torch.Tensor:
    """The gradient that a step applied, caught before it is cleared."""
    caught: list[torch.Tensor] = []
    optimizer = engine.optimizer
    apply = optimizer.optimizers["adamw"].step

    def catch() -> None:
        caught.append(
            torch.cat([p.grad.flatten() for p in optimizer.masters if p.grad is not None])
        )
        apply()

    optimizer.optimizers["adamw"].step = catch
    done = update(engine)
    assert done.stepped.is_applied
    assert done.stepped.grad_norm == pytest.approx(float(caught[0].double().norm()), rel=1e-4)
    return caught[0].double()


def actor_step(passes: MicroBatching, objective: Objective, batch):
    engine = actor(passes)
    held = {}

    def update(engine):
        held["done"] = engine.update(batch, objective, lr=0.01, seed=4)
        return held["done"]

    return gradient(engine, update), held["done"].metrics


@pytest.mark.parametrize("name", OBJECTIVES)
def test_micro_batches_do_not_change_the_policys_gradient(name: str):
    batch = recorded()
    whole, metrics = actor_step(PASSES["all at once"], OBJECTIVES[name], batch)
    assert whole.norm() > 1e-3
    for passes in list(PASSES.values())[:3]:
        parts, merged = actor_step(passes, OBJECTIVES[name], batch)
        assert (parts - whole).norm() < 1e-6 * whole.norm()
        assert merged.keys() == metrics.keys()
        assert merged == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_what_stands_on_masked_tokens_changes_nothing(name: str, garbage: float):
    clean, metrics = actor_step(PASSES["by tokens"], OBJECTIVES[name], recorded())
    dirty, again = actor_step(PASSES["by tokens"], OBJECTIVES[name], recorded(garbage=garbage))
    assert torch.equal(clean, dirty)
    assert metrics == again


def test_the_gradient_is_that_of_each_sequence_alone_in_plain_transformers():
    """-mean(w·A·logp) over the trainable tokens, one sequence at a time through transformers."""
    batch = recorded()
    found, _ = actor_step(PASSES["by tokens"], Objective(loss="gpg"), batch)
    policy = tiny_policy(initializer_range=0.1)
    policy.model.set_attn_implementation("eager")
    loss, start = torch.zeros(()), 0
    for length in batch.lengths:
        span = slice(start, start + length)
        start += length
        logits = policy.model(input_ids=batch.tokens[span][None]).logits[0, :-1, :61]
        logp = logits.log_softmax(-1).gather(-1, batch.tokens[span][1:, None])[:, 0]
        mask = batch.layout.mask[span][1:]
        factor = (batch.streams["advantages"] * batch.streams["is_weights"])[span][1:]
        loss = loss - (logp * factor)[mask].sum()
    (loss / batch.layout.mask.sum()).backward()
    expected = torch.cat([p.grad.flatten() for p in policy.parameters()]).double()
    assert (found - expected).norm() < 1e-5 * expected.norm()


def critic_step(passes: MicroBatching, batch) -> torch.Tensor:
    return gradient(critic(passes), lambda engine: engine.update(batch, lr=0.01))


def test_micro_batches_and_garbage_do_not_change_the_critics_gradient():
    whole = critic_step(PASSES["all at once"], recorded())
    for passes in list(PASSES.values())[:3]:
        parts = critic_step(passes, recorded())
        assert (parts - whole).norm() < 1e-6 * whole.norm()
    dirty = critic_step(PASSES["all at once"], recorded(garbage=float("nan")))
    assert torch.equal(dirty, whole)


def test_values_and_scores_do_not_depend_on_the_passes():
    batch = recorded()
    values = [critic(passes).values(batch) for passes in PASSES.values()]
    assert all(torch.equal(values[0], other) for other in values[1:])
    assert values[0][batch.layout.mask].abs().min() > 0
    assert values[0][~batch.layout.mask].abs().max() == 0
    policy = tiny_policy(initializer_range=0.1)
    options = {"temperature": 0.8, "entropy": True, "sum_pi_squared": True}
    scores = [score(policy, batch, passes, **options) for passes in PASSES.values()]
    assert scores[0].keys() == {"logp", "entropy", "sum_pi_squared"}
    assert all(torch.equal(scores[0][k], other[k]) for other in scores[1:] for k in scores[0])


def test_supervised_steps_do_not_depend_on_the_passes():
    def step(passes: MicroBatching) -> torch.Tensor:
        policy = tiny_policy(initializer_range=0.1)
        optimizer = MasterOptimizer(policy.parameters(), OPTIM)
        batch = TokenAggregation().weigh(recorded())
        engine = SupervisedEngine(policy, optimizer)
        return gradient(engine, lambda engine: whole(engine, passes).update(batch, lr=0.01))

    uncut = step(PASSES["all at once"])
    assert (step(PASSES["one by one"]) - uncut).norm() < 1e-6 * uncut.norm()


def test_the_gap_is_measured_when_the_update_starts_from_the_sampler():
    batch = recorded()
    policy = tiny_policy(initializer_range=0.1)
    said = score(policy, batch, PASSES["three at once"], temperature=0.7)["logp"]
    streams = {k: v for k, v in batch.streams.items() if k != "old_logp"}
    exact = type(batch)(
        tokens=batch.tokens, lengths=batch.lengths, layout=batch.layout, streams=streams
    ).with_streams(rollout_logp=said)
    engine = actor(PASSES["by tokens"], temperature=0.7)
    metrics = engine.update(exact, Objective(loss="vanilla"), lr=0.0, seed=0).metrics
    assert (metrics["parity/max_gap"], metrics["parity/exact_fraction"]) == (0.0, 1.0)
    again = engine.update(batch, Objective(loss="vanilla"), lr=0.0, seed=0).metrics
    assert "parity/max_gap" not in again


def test_gap_metrics_by_hand():
    batch = pack([[1, 2, 3], [4, 5, 6]], masks=[[0, 1, 1], [0, 1, 1]], groups=[0, 0])
    logp = torch.tensor([9.0, -1.0, -1.5, 9.0, -0.25, -2.0])
    assert gap_metrics(batch, logp) == {}
    drawn = torch.tensor([0.0, -1.0, -1.0, 0.0, -0.5, -2.0])
    assert gap_metrics(batch.with_streams(rollout_logp=drawn), logp) == {
        "parity/max_gap": 0.5,
        "parity/mean_gap": 0.1875,
        "parity/exact_fraction": 0.5,
    }


def test_a_broken_loss_changes_no_weight_and_is_reported():
    batch = recorded()
    bad = batch.streams["advantages"].clone()
    bad[batch.layout.mask.nonzero()[0, 0]] = float("nan")
    engine = actor(PASSES["by tokens"])
    before = [p.detach().clone() for p in engine.policy.parameters()]
    done = engine.update(batch.with_streams(advantages=bad), OBJECTIVES["vanilla"], lr=0.1, seed=0)
    assert not done.stepped.is_applied
    assert all(torch.equal(a, b) for a, b in zip(before, engine.policy.parameters(), strict=True))
    assert engine.update(batch, OBJECTIVES["vanilla"], lr=0.1, seed=0).stepped.is_applied
    assert not engine.policy.training
