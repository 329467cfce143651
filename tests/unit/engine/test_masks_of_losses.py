"""Dropout of an adapter where a loss looks at whole sequences: the gradient is that of the loss.

The pass that scores and the pass that learns have the same masks. The expected gradient is that of
one graph over all micro-batches, each with the masks of its place.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from luyen.algorithms.preference.inputs import PairInputs
from luyen.algorithms.preference.step import PreferenceObjective, sequence_sums, step_mean
from luyen.base.seeds import mix
from luyen.config.schema.model import ModelConfig
from luyen.engine.batch import MicroBatching, PackedBatch, split_batch
from luyen.engine.distill import DIVERGENCE, DistillEngine, DistillObjective
from luyen.engine.optim import MasterOptimizer, OptimizerStep
from luyen.engine.preference import PreferenceTrainer
from luyen.engine.reward_model import JUDGED, RewardModelEngine, RewardTrainer
from luyen.engine.supervised import SupervisedEngine
from luyen.models.adapter_dropout import dropout_layers
from luyen.models.lora import add_adapter
from luyen.models.policy import Policy
from luyen.models.reward_model import RewardModel, load_reward_model
from tests.tiny_models import VOCABULARY, tiny_net
from tests.unit.engine import test_preference, test_reward_model
from tests.unit.engine.steps import OPTIM, whole
from tests.unit.engine.test_distill import teacher, weighed

KEY = 5
PASSES = MicroBatching(sequences=2)
LORA: dict[str, Any] = {"lora_rank": 4, "lora_alpha": 8, "lora_dropout": 0.3}


class Catching:
    """An optimizer that keeps the gradient and changes nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.gradient = torch.empty(0)

    def step(self, lr: float) -> OptimizerStep:
        self.gradient = gradient_of(self.model)
        self.model.zero_grad(set_to_none=True)
        return OptimizerStep(grad_norm=float(self.gradient.norm()), is_applied=True, lr=lr)


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten().double() for p in model.parameters() if p.grad is not None])


def disturb(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def adapted_policy() -> Policy:
    net = tiny_net(initializer_range=0.1)
    add_adapter(net, ModelConfig(**LORA))
    policy = Policy(net, vocabulary=VOCABULARY).eval()
    disturb(policy)
    return policy


def adapted_judge() -> RewardModel:
    # Its graph holds several micro-batches: what is computed again would have the last one's masks.
    model = ModelConfig(path="builtin://arithmetic", enable_gradient_checkpointing=False, **LORA)
    judge = load_reward_model(model, device="cpu", field="path", new_head=3)
    disturb(judge)
    return judge


def masked_parts(model: nn.Module, batch: PackedBatch) -> Iterator[tuple[list[int], PackedBatch]]:
    """Every micro-batch, with its masks in force."""
    model.train()
    [shard] = split_batch(batch, PASSES, ranks=1)
    assert len(shard.passes) == 3
    for index, indices in enumerate(shard.passes):
        for layer in dropout_layers(model):
            layer.key = mix(KEY, index)
        yield list(indices), batch.take(indices)


def preference_gradient(objective: PreferenceObjective, key: int) -> Tensor:
    policy = adapted_policy()
    catching: Any = Catching(policy)
    trainer = PreferenceTrainer(whole(SupervisedEngine(policy, catching), PASSES), objective)
    trainer.update(test_preference.offline_batch("pair"), lr=0.1, dropout_key=key)
    assert not any(layer.training for layer in dropout_layers(policy))
    return catching.gradient


def test_a_preference_loss_has_the_gradient_of_its_masks():
    objective = PreferenceObjective(losses=("simpo",))
    policy, given = adapted_policy(), test_preference.offline_batch("pair")
    sums = torch.zeros(len(given.batch.lengths))
    for indices, part in masked_parts(policy, given.batch):
        scored = policy(part.tokens, part.lengths, part.layout.mask)
        own = sequence_sums(part.scatter(scored.logp), part.layout, None)
        sums = sums.index_copy(0, torch.tensor(indices), own.to(sums.dtype))
    lengths = given.batch.layout.lengths()
    inputs = PairInputs(
        chosen=sums[0::2],
        rejected=sums[1::2],
        chosen_tokens=lengths[0::2],
        rejected_tokens=lengths[1::2],
    )
    step_mean(objective(inputs).loss).backward()
    expected = gradient_of(policy)
    assert expected.norm() > 1e-4
    found = preference_gradient(objective, KEY)
    assert (found - expected).norm() < 2e-5 * expected.norm()
    other = preference_gradient(objective, KEY + 1)
    assert (other - expected).norm() > 1e-2 * expected.norm(), "other masks"


def test_a_reward_loss_has_the_gradient_of_its_masks():
    judge, given = adapted_judge(), test_reward_model.offline_batch("bradley_terry")
    judged = given.batch.streams[JUDGED].bool()
    stream = torch.zeros(len(judged), dtype=judge.head.weight.dtype)
    for indices, part in masked_parts(judge, given.batch):
        own = part.streams[JUDGED].bool()
        found = judge(part.tokens, part.lengths, part.layout.mask, own)
        stream = stream.index_put((given.batch.positions(indices)[own],), found)
    loss = test_reward_model.OBJECTIVES["bradley_terry"]
    loss.loss(stream[judged].double(), given.numbers).loss.mean().backward()
    expected = gradient_of(judge)
    catching: Any = Catching(judge)
    trainer = RewardTrainer(whole(RewardModelEngine(judge, catching), PASSES), loss)
    judge.zero_grad(set_to_none=True)
    trainer.update(given, lr=0.1, dropout_key=KEY)
    assert expected.norm() > 1e-4
    assert (catching.gradient - expected).norm() < 1e-4 * expected.norm()


@pytest.mark.parametrize("key", [KEY, KEY + 1])
def test_a_student_is_measured_with_the_masks_that_it_learns_with(key: int):
    student = adapted_policy()
    trained = [p for p in student.parameters() if p.requires_grad]
    engine = DistillEngine(
        student,
        MasterOptimizer(trained, OPTIM),
        teacher(),
        DistillObjective(divergence="reverse_kl"),
    )
    learner, batch = whole(engine, PASSES), weighed()
    mask = batch.layout.mask
    with_masks = learner.scores(batch, dropout_key=key)[DIVERGENCE][mask].mean()
    without = learner.scores(batch)[DIVERGENCE][mask].mean()
    done = learner.update(batch, lr=0.01, dropout_key=key)
    assert done.metrics["distill/divergence"] == pytest.approx(float(with_masks), rel=1e-5)
    assert abs(float(with_masks - without)) > 1e-4 * float(without)
