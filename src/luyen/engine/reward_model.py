"""Training of reward models.

The loss is a function of the scores of the whole step. A pass without gradients computes them, the
loss its derivative by each, and a second pass backpropagates with the derivatives as weights. So
gradient, accuracy and calibration do not depend on micro-batching, even between the two responses
of a pair. With dropout in an adapter both passes have the same masks, those of their micro-batch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from luyen.algorithms.aggregation import Average
from luyen.algorithms.reward_losses import RewardLoss, bradley_terry, process_reward, regression
from luyen.base.heartbeat import beat
from luyen.engine.batch import BatchShard, OfflineBatch, PackedBatch
from luyen.engine.fsdp import dummy_loss, reshard
from luyen.engine.optim import MasterOptimizer
from luyen.engine.step import (
    LOSS_WEIGHT,
    BatchLearner,
    ShardUpdateResult,
    UpdateResult,
    take_shard_step,
)
from luyen.models.adapter_dropout import PassMasks
from luyen.models.reward_model import RewardModel

JUDGED = "judged"
"""Stream: 1 at the tokens that have a score, else 0."""
SCORES = "scores"
"""Stream: the score of each judged token, else 0."""
MARGINS, TARGETS, LABELS = "margins", "targets", "labels"
"""Numbers of a batch: one per pair, per sequence, per judged step."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RewardObjective:
    """The loss of a reward model: the mean over the pairs, responses or reasoning steps.

    Example:
        >>> pairs = RewardObjective(name="bradley_terry", center_rewards_coefficient=0.01)
        >>> found = pairs.loss(torch.tensor([1.0, -1.0]), {})
        >>> found.loss, found.metrics["reward_model/accuracy"].value()
        (tensor([0.1269]), 1.0)
    """

    name: str
    """bradley_terry, regression or process."""
    center_rewards_coefficient: float = 0.0
    """bradley_terry: weight of the penalty that centres scores at 0."""

    def loss(self, scores: Tensor, numbers: Mapping[str, Tensor]) -> RewardLoss:
        """Losses of all judged tokens; those of a pair are adjacent, the chosen one first."""
        match self.name:
            case "bradley_terry":
                return bradley_terry(
                    scores[0::2],
                    scores[1::2],
                    margins=numbers.get(MARGINS),
                    center_rewards_coefficient=self.center_rewards_coefficient,
                )
            case "regression":
                return regression(scores, numbers[TARGETS].to(scores.dtype))
            case _:
                is_known = torch.ones_like(scores, dtype=torch.bool)
                return process_reward(scores, numbers[LABELS].to(scores.dtype), is_known)

    def derivative(
        self, scores: Tensor, numbers: Mapping[str, Tensor]
    ) -> tuple[Tensor, RewardLoss]:
        """The derivative of the mean loss by each score, and the losses, in float64."""
        with torch.enable_grad():
            leaf = scores.detach().double().requires_grad_()
            found = self.loss(leaf, numbers)
            (slope,) = torch.autograd.grad(found.loss.mean(), leaf)
        return slope, found


@final
class RewardModelEngine:
    """A reward model, or this rank's shards of it, and its optimizer."""

    def __init__(
        self,
        model: RewardModel,
        optimizer: MasterOptimizer,
        *,
        device: torch.device | None = None,
    ) -> None:
        """`device` is where passes run, if not where the weights are (they may be offloaded)."""
        self.model = model
        self.optimizer = optimizer
        self._device = device

    def score_shard(
        self, shard: BatchShard, *, dropout_key: int | None = None
    ) -> dict[str, Tensor]:
        """The stream `scores`."""
        masks = PassMasks(self.model, dropout_key)
        with masks.in_scores():
            return score_shard(self.model, shard, device=self._device, begin_pass=masks.begin)

    def update_shard(
        self, shard: BatchShard, *, lr: float, dropout_key: int | None = None
    ) -> ShardUpdateResult:
        """This rank's part of an optimizer step; weights are derivatives by the scores."""
        masks = PassMasks(self.model, dropout_key)

        def part_loss(part: PackedBatch, place: Tensor) -> tuple[Tensor, Mapping[str, Average]]:
            del place
            masks.begin()
            judged = part.streams[JUDGED].bool()
            scores = self.model(part.tokens, part.lengths, part.layout.mask, judged)
            return (part.streams[LOSS_WEIGHT][judged] * scores).sum(), {}

        home, here = shard.batch.tokens.device, shard.to(self._device or self.model.device)
        return take_shard_step(self.model, self.optimizer, here, part_loss, lr=lr).to(home)


@final
class RewardTrainer:
    """Whole optimizer steps of a reward model."""

    def __init__(self, learner: BatchLearner, objective: RewardObjective) -> None:
        self.learner = learner
        self.objective = objective

    def update(
        self, offline_batch: OfflineBatch, *, lr: float, dropout_key: int | None = None
    ) -> UpdateResult:
        """One optimizer step on the whole batch.

        Scores have the masks of the update, which `dropout_key` decides where the adapter has
        dropout; without it the result does not depend on micro-batching.
        """
        scores = self.learner.scores(offline_batch.batch, dropout_key=dropout_key)[SCORES]
        prepared, found = self.prepare_update(offline_batch, scores)
        done = self.learner.update(prepared, lr=lr, dropout_key=dropout_key)
        return replace(done, metrics=numbers_of(found))

    def measure(self, offline_batch: OfflineBatch) -> dict[str, float]:
        """Loss, accuracy and calibration of a batch, without an update."""
        scores = self.learner.scores(offline_batch.batch)[SCORES]
        judged = offline_batch.batch.streams[JUDGED].bool()
        return numbers_of(self.objective.loss(scores[judged].double(), offline_batch.numbers))

    def prepare_update(
        self, offline_batch: OfflineBatch, scores: Tensor
    ) -> tuple[PackedBatch, RewardLoss]:
        """The batch with the derivative of every score as a stream, given the stream of scores."""
        batch = offline_batch.batch
        judged = batch.streams[JUDGED].bool()
        slope, found = self.objective.derivative(scores[judged], offline_batch.numbers)
        weights = torch.zeros_like(scores).masked_scatter(judged, slope.to(scores.dtype))
        return batch.with_streams(**{LOSS_WEIGHT: weights}), found


@torch.no_grad()
def score_shard(
    model: RewardModel,
    shard: BatchShard,
    *,
    device: torch.device | None = None,
    begin_pass: Callable[[], None] = lambda: None,
) -> dict[str, Tensor]:
    """The stream `scores` over the tokens of a shard.

    `device` is where passes run; `begin_pass` is called before each.
    """
    home, here = shard.batch.tokens.device, device or model.device
    batch = shard.to(here).batch
    stream = torch.zeros(batch.tokens.shape, dtype=model.head.weight.dtype, device=here)
    for indices in shard.passes:
        if not indices:
            dummy_loss(model, here)
            continue
        begin_pass()
        part = batch.take(indices)
        judged = part.streams[JUDGED].bool()
        found = model(part.tokens, part.lengths, part.layout.mask, judged)
        stream[batch.positions(indices)[judged]] = found
        beat()
    reshard(model)
    return {SCORES: stream.to(home)}


def numbers_of(found: RewardLoss) -> dict[str, float]:
    """Means over the step, and the calibration error."""
    numbers = {name: average.value() for name, average in found.metrics.items()}
    if found.calibration is None:
        return numbers
    return {**numbers, "reward_model/calibration_error": found.calibration.error()}
