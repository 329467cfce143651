"""Steps of a reward model: the gradient is that of the whole step, however it is cut."""

import itertools
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luyen.config.schema.actor_rollout_ref import OptimConfig
from luyen.engine.batch import MicroBatching, OfflineBatch, pack, split_batch
from luyen.engine.optim import MasterOptimizer, OptimizerStep
from luyen.engine.reward_model import (
    JUDGED,
    LABELS,
    MARGINS,
    SCORES,
    TARGETS,
    RewardModelEngine,
    RewardObjective,
    RewardTrainer,
)
from luyen.models.reward_model import RewardModel
from tests.tiny_models import tiny_judge_net
from tests.unit.engine import steps

PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
ANSWERS = [([12, 13], [14]), ([15, 16, 17, 18], [19, 20]), ([21], [22, 23, 24])]
TOLERANCE = 1e-6
"""The norms of transformers round to float32 even in a float64 model."""
OBJECTIVES = {
    "bradley_terry": RewardObjective(name="bradley_terry", center_rewards_coefficient=0.05),
    "regression": RewardObjective(name="regression"),
    "process": RewardObjective(name="process"),
}


def reward_model(*, seed: int = 0, dtype: torch.dtype = torch.float64) -> RewardModel:
    return RewardModel(tiny_judge_net(seed=seed, dtype=dtype)).eval()


def offline_batch(name: str) -> OfflineBatch:
    """Three prompts with two answers each; of processes, every second token ends a step."""
    sequences = [p + a for p, both in zip(PROMPTS, ANSWERS, strict=True) for a in both]
    starts = [len(p) for p in PROMPTS for _ in range(2)]
    masks = [[i >= n for i in range(len(s))] for s, n in zip(sequences, starts, strict=True)]
    batch = pack(sequences, masks=masks, groups=[0, 0, 1, 1, 2, 2])
    ends = batch.layout.offsets[1:] - 1
    judged = torch.zeros(len(batch.tokens))
    judged[ends] = 1.0
    if name == "process":
        judged[ends[1::2] - 1] = 1.0
    count = int(judged.sum())
    numbers = {
        "bradley_terry": {MARGINS: torch.tensor([0.0, 0.5, 1.0])},
        "regression": {TARGETS: torch.linspace(-1, 2, count)},
        "process": {LABELS: torch.linspace(0, 1, count)},
    }[name]
    return OfflineBatch(
        rows=(0, 1, 2), batch=batch.with_streams(**{JUDGED: judged}), numbers=numbers
    )


class Catching:
    """An optimizer that keeps the gradient and changes nothing."""

    def __init__(self, model: RewardModel) -> None:
        self.model = model
        self.gradient = torch.empty(0)

    def step(self, lr: float) -> OptimizerStep:
        parts = [p.grad.flatten().double() for p in self.model.parameters() if p.grad is not None]
        self.gradient = torch.cat(parts)
        self.model.zero_grad(set_to_none=True)
        return OptimizerStep(grad_norm=float(self.gradient.norm()), is_applied=True, lr=lr)


class Cut:
    """Passes that are given one by one."""

    def __init__(self, parts: list[list[int]]) -> None:
        self.parts = parts

    def of(self, lengths: Any, groups: Any = None) -> list[list[int]]:
        return self.parts


def trainer_of(model: RewardModel, optimizer: Any, passes: Any, name: str) -> RewardTrainer:
    return RewardTrainer(steps.whole(RewardModelEngine(model, optimizer), passes), OBJECTIVES[name])


def gradient(model: RewardModel, name: str, passes: Any) -> tuple[torch.Tensor, dict[str, float]]:
    catching: Any = Catching(model)
    trainer = trainer_of(model, catching, passes, name)
    done = trainer.update(offline_batch(name), lr=0.1)
    return catching.gradient, dict(done.metrics)


@pytest.fixture(scope="module")
def model() -> RewardModel:
    return reward_model()


@pytest.fixture(scope="module")
def whole(model: RewardModel) -> dict[str, Any]:
    return {name: gradient(model, name, MicroBatching(sequences=6)) for name in OBJECTIVES}


@pytest.mark.parametrize("name", OBJECTIVES)
@settings(max_examples=12, deadline=None)
@given(order=st.permutations(range(6)), cuts=st.sets(st.integers(1, 5)))
def test_any_cut_has_the_gradient_and_the_numbers_of_the_whole(name, model, whole, order, cuts):
    """Pairs may stand in different parts, and parts in any order."""
    edges = [0, *sorted(cuts), 6]
    parts = [list(order[a:b]) for a, b in itertools.pairwise(edges)]
    found, metrics = gradient(model, name, Cut(parts))
    expected, numbers = whole[name]
    assert expected.norm() > 1e-3
    assert (found - expected).norm() < TOLERANCE * expected.norm()
    assert metrics == pytest.approx(numbers, rel=1e-6)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_that_of_the_loss_of_plain_transformers(name, model, whole):
    """One sequence at a time through transformers' own attention and head."""
    net: Any = tiny_judge_net(dtype=torch.float64)
    net.set_attn_implementation("eager")
    given = offline_batch(name)
    scores = []
    for i in range(6):
        one = given.batch.take([i])
        hidden = net.model(one.tokens[None]).last_hidden_state[0]
        scores.append(net.score(hidden)[one.streams[JUDGED].bool(), 0])
    OBJECTIVES[name].loss(torch.cat(scores), given.numbers).loss.mean().backward()
    expected = torch.cat([p.grad.flatten() for p in net.parameters()])
    assert (whole[name][0] - expected).norm() < 1e-6 * expected.norm()


@pytest.mark.parametrize("ranks", [2, 3])
def test_shares_of_ranks_add_up_to_the_gradient_of_the_whole(model, whole, ranks: int):
    """A controller scores, weighs once, and deals out; gradients are summed."""
    given, passes = offline_batch("bradley_terry"), MicroBatching(max_tokens=12)
    catching: Any = Catching(model)
    engine = RewardModelEngine(model, catching)
    trainer = trainer_of(model, catching, passes, "bradley_terry")
    prepared, _ = trainer.prepare_update(given, trainer.learner.scores(given.batch)[SCORES])
    total = torch.zeros_like(whole["bradley_terry"][0])
    for share in split_batch(prepared, passes, ranks=ranks):
        engine.update_shard(share, lr=0.1)
        total += catching.gradient
    expected = whole["bradley_terry"][0]
    assert (total - expected).norm() < TOLERANCE * expected.norm()


def test_scores_do_not_depend_on_the_passes():
    engine: Any = RewardModelEngine(reward_model(dtype=torch.float32), cast(Any, None))
    batch = offline_batch("process").batch
    found = [
        steps.whole(engine, passes).scores(batch)[SCORES]
        for passes in (
            MicroBatching(sequences=6),
            MicroBatching(sequences=1),
            MicroBatching(max_tokens=13),
        )
    ]
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[0] != 0, batch.streams[JUDGED].bool())


def test_steps_make_the_chosen_answer_win():
    model = reward_model(dtype=torch.float32)
    optimizer = MasterOptimizer(model.parameters(), OptimConfig(lr=1e-3))
    engine = trainer_of(model, optimizer, MicroBatching(sequences=2), "bradley_terry")
    given = offline_batch("bradley_terry")
    first = engine.measure(given)["reward_model/loss"]
    for _ in range(8):
        engine.update(given, lr=1e-3)
    numbers = engine.measure(given)
    assert numbers["reward_model/loss"] < 0.5 * first
    assert numbers["reward_model/accuracy"] == 1.0
    assert set(numbers) == {
        f"reward_model/{name}"
        for name in (
            "loss",
            "accuracy",
            "margin",
            "chosen_score",
            "rejected_score",
            "calibration_error",
        )
    }
