"""Supervised fine-tuning: optimizer steps on given responses."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from luyen.algorithms.aggregation import Average, aggregation_weights
from luyen.algorithms.supervised import supervised_losses
from luyen.engine.batch import BatchShard, PackedBatch
from luyen.engine.logprobs import score_shard
from luyen.engine.optim import MasterOptimizer
from luyen.engine.step import LOSS_WEIGHT, ShardUpdateResult, take_shard_step
from luyen.models.adapter_dropout import PassMasks
from luyen.models.policy import Policy

TOKEN_WEIGHT = "token_weight"
"""Stream: relative weight of each trainable token; without it all are equal."""

ACCURACY = "sft/accuracy"
"""Metric: share of the trained tokens that no other token is likelier than."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenAggregation:
    """The weight of every token in the loss of a whole optimizer step.

    Example:
        >>> from luyen.engine.batch import pack
        >>> batch = pack([[1, 2, 3], [4, 5]], masks=[[0, 1, 1], [0, 1]], groups=[0, 1])
        >>> weighed = TokenAggregation(mode="token-sum").weigh(batch)
        >>> weighed.streams["loss_weight"].tolist()
        [0.0, 1.0, 1.0, 0.0, 1.0]
    """

    mode: str = "token-mean"
    """`loss_agg_mode`."""
    loss_scale_factor: float | None = None
    """`loss_scale_factor` of the mode."""

    def weigh(self, batch: PackedBatch) -> PackedBatch:
        """The batch with the stream `LOSS_WEIGHT`; `TOKEN_WEIGHT` does not change its sum."""
        weights = aggregation_weights(
            self.mode, batch.layout, loss_scale_factor=self.loss_scale_factor
        )
        if TOKEN_WEIGHT in batch.streams:
            counted = weights * batch.streams[TOKEN_WEIGHT]
            weights = counted * (weights.double().sum() / counted.double().sum()).float()
        return batch.with_streams(**{LOSS_WEIGHT: weights})


@final
class SupervisedEngine:
    """A policy, or this rank's shards of it, and its optimizer."""

    def __init__(
        self,
        policy: Policy,
        optimizer: MasterOptimizer,
        *,
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
        self._loss = supervised_losses.get(loss)
        self._device = device

    @property
    def model(self) -> Policy:
        """The policy."""
        return self.policy

    def score_shard(
        self, shard: BatchShard, *, dropout_key: int | None = None
    ) -> dict[str, Tensor]:
        """Log-probabilities at temperature 1, and what the accuracy needs if it is measured."""
        masks = PassMasks(self.policy, dropout_key)
        with masks.in_scores():
            return score_shard(
                self.policy,
                shard,
                temperature=1.0,
                likeliest=self.measures_accuracy,
                device=self._device,
                begin_pass=masks.begin,
            )

    def update_shard(
        self, shard: BatchShard, *, lr: float, dropout_key: int | None = None
    ) -> ShardUpdateResult:
        """This rank's part of an optimizer step on a batch of `TokenAggregation.weigh`.

        The result does not depend on micro-batching, unless the adapter has dropout: each
        micro-batch has masks of its own.
        """
        masks = PassMasks(self.policy, dropout_key)

        def part_loss(part: PackedBatch, place: Tensor) -> tuple[Tensor, Mapping[str, Average]]:
            del place
            masks.begin()
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
