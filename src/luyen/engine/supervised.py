"""Optimizer steps on given answers."""

from collections.abc import Mapping
from typing import final

from torch import Tensor

from luyen.algorithms.aggregation import aggregation_weights
from luyen.algorithms.statistic import Average
from luyen.algorithms.supervised import negative_log_likelihood
from luyen.engine.batch import PackedBatch
from luyen.engine.optim import MasterAdamW
from luyen.engine.passes import Passes
from luyen.engine.step import Updated, take_step
from luyen.models.policy import Policy


@final
class SupervisedEngine:
    """One policy on one device, its optimizer, and how passes are cut."""

    def __init__(
        self, policy: Policy, optimizer: MasterAdamW, passes: Passes, *, aggregation: str
    ) -> None:
        self.policy = policy
        self.optimizer = optimizer
        self.passes = passes
        self.aggregation = aggregation

    def update(self, batch: PackedBatch, *, lr: float) -> Updated:
        """One optimizer step on the whole batch, whatever the micro-batches are."""
        weights = aggregation_weights(self.aggregation, batch.layout)

        def part_loss(part: PackedBatch, place: Tensor) -> tuple[Tensor, Mapping[str, Average]]:
            scored = self.policy(part.tokens, part.lengths, part.layout.mask)
            loss = negative_log_likelihood(part.scatter(scored.logp), part.layout)
            return (weights[place] * loss.per_token).sum(), loss.metrics

        return take_step(self.policy, self.optimizer, batch, self.passes, part_loss, lr=lr)
