"""Supervised fine-tuning: optimizer steps on given responses."""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from luyen.algorithms.aggregation import aggregation_weights
from luyen.algorithms.statistic import Average
from luyen.algorithms.supervised import supervised_losses
from luyen.engine.batch import PackedBatch
from luyen.engine.batch_shards import BatchShard, MicroBatching, split_batch
from luyen.engine.optim import MasterAdamW
from luyen.engine.step import (
    LOSS_WEIGHT,
    ShardUpdateResult,
    UpdateResult,
    merge_updates,
    take_shard_step,
)
from luyen.models.policy import Policy

TOKEN_WEIGHT = "token_weight"
"""Stream: relative weight of each trainable token; without it all are equal."""


@final
class SupervisedEngine:
    """A policy, or this rank's shards of it, its optimizer, and its micro-batching."""

    def __init__(
        self,
        policy: Policy,
        optimizer: MasterAdamW,
        passes: MicroBatching,
        *,
        aggregation: str,
        loss_scale_factor: float | None = None,
        loss: str = "nll",
        device: torch.device | None = None,
    ) -> None:
        """`device` is where passes run, if not where the weights are (they may be offloaded)."""
        self.policy = policy
        self.optimizer = optimizer
        self.passes = passes
        self.aggregation = aggregation
        self.loss_scale_factor = loss_scale_factor
        self._loss = supervised_losses.get(loss)
        self._device = device

    def prepare_update(self, batch: PackedBatch) -> PackedBatch:
        """The batch with the weight of every token in the loss of the whole optimizer step.

        `TOKEN_WEIGHT` does not change the sum of the weights.
        """
        weights = aggregation_weights(
            self.aggregation, batch.layout, loss_scale_factor=self.loss_scale_factor
        )
        if TOKEN_WEIGHT in batch.streams:
            counted = weights * batch.streams[TOKEN_WEIGHT]
            weights = counted * (weights.double().sum() / counted.double().sum()).float()
        return batch.with_streams(**{LOSS_WEIGHT: weights})

    def update(self, batch: PackedBatch, *, lr: float) -> UpdateResult:
        """One optimizer step on the whole batch; the result does not depend on micro-batching."""
        return self.update_prepared(self.prepare_update(batch), lr=lr)

    def update_prepared(self, batch: PackedBatch, *, lr: float) -> UpdateResult:
        """One optimizer step on a batch from `prepare_update`."""
        (shard,) = shards = split_batch(batch, self.passes, ranks=1)
        return merge_updates(shards, [self.update_shard(shard, lr=lr)])

    def update_shard(self, shard: BatchShard, *, lr: float) -> ShardUpdateResult:
        """This rank's part of an optimizer step on a batch from `prepare_update`."""

        def part_loss(part: PackedBatch, place: Tensor) -> tuple[Tensor, Mapping[str, Average]]:
            del place
            scored = self.policy(part.tokens, part.lengths, part.layout.mask)
            loss = self._loss(part.scatter(scored.logp), part.layout)
            return (part.streams[LOSS_WEIGHT] * loss.per_token).sum(), loss.metrics

        home, here = shard.batch.tokens.device, shard.to(self._device or self.policy.device)
        return take_shard_step(self.policy, self.optimizer, here, part_loss, lr=lr).to(home)
