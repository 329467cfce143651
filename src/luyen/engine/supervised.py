"""Supervised fine-tuning: optimizer steps on given responses."""

from collections.abc import Mapping
from itertools import count
from typing import final

import torch
from torch import Tensor

from luyen.algorithms.aggregation import aggregation_weights
from luyen.algorithms.statistic import Average
from luyen.algorithms.supervised import supervised_losses
from luyen.engine.batch import PackedBatch
from luyen.engine.batch_shards import BatchShard, MicroBatching, split_batch
from luyen.engine.optim import MasterOptimizer
from luyen.engine.step import (
    LOSS_WEIGHT,
    ShardUpdateResult,
    UpdateResult,
    merge_updates,
    take_shard_step,
)
from luyen.models.adapter_dropout import begin_pass, dropout_layers
from luyen.models.policy import Policy

TOKEN_WEIGHT = "token_weight"
"""Stream: relative weight of each trainable token; without it all are equal."""

ACCURACY = "sft/accuracy"
"""Metric: share of the trained tokens that no other token is likelier than."""


@final
class SupervisedEngine:
    """A policy, or this rank's shards of it, its optimizer, and its micro-batching."""

    def __init__(
        self,
        policy: Policy,
        optimizer: MasterOptimizer,
        passes: MicroBatching,
        *,
        aggregation: str,
        loss_scale_factor: float | None = None,
        loss: str = "nll",
        measures_accuracy: bool = False,
        device: torch.device | None = None,
    ) -> None:
        """`measures_accuracy` adds the share of trained tokens that are the policy's likeliest.

        `device` is where passes run, if not where the weights are (they may be offloaded).
        """
        self.measures_accuracy = measures_accuracy
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

    def update(
        self, batch: PackedBatch, *, lr: float, dropout_key: int | None = None
    ) -> UpdateResult:
        """One optimizer step on the whole batch.

        The result does not depend on micro-batching, unless the adapter has dropout: then
        `dropout_key` is the step's, and each micro-batch has masks of its own.
        """
        prepared = self.prepare_update(batch)
        return self.update_prepared(prepared, lr=lr, dropout_key=dropout_key)

    def update_prepared(
        self, batch: PackedBatch, *, lr: float, dropout_key: int | None = None
    ) -> UpdateResult:
        """One optimizer step on a batch from `prepare_update`."""
        (shard,) = shards = split_batch(batch, self.passes, ranks=1)
        return merge_updates(shards, [self.update_shard(shard, lr=lr, dropout_key=dropout_key)])

    def update_shard(
        self, shard: BatchShard, *, lr: float, dropout_key: int | None = None
    ) -> ShardUpdateResult:
        """This rank's part of an optimizer step on a batch from `prepare_update`."""
        masked = [] if dropout_key is None else dropout_layers(self.policy)
        indices = count()

        def part_loss(part: PackedBatch, place: Tensor) -> tuple[Tensor, Mapping[str, Average]]:
            del place
            if dropout_key is not None:
                begin_pass(masked, dropout_key, next(indices))
            mask = part.layout.mask
            likeliest = self.measures_accuracy
            scored = self.policy(part.tokens, part.lengths, mask, likeliest=likeliest)
            loss = self._loss(part.scatter(scored.logp), part.layout)
            metrics = loss.metrics
            if scored.is_likeliest is not None:
                right = Average.over(part.scatter(scored.is_likeliest), mask)
                metrics = {**metrics, ACCURACY: right}
            return (part.streams[LOSS_WEIGHT] * loss.per_token).sum(), metrics

        home, here = shard.batch.tokens.device, shard.to(self._device or self.policy.device)
        return take_shard_step(self.policy, self.optimizer, here, part_loss, lr=lr).to(home)
