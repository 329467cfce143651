"""Optimizer steps on given answers."""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from luyen.algorithms.aggregation import aggregation_weights
from luyen.algorithms.statistic import Average
from luyen.algorithms.supervised import negative_log_likelihood
from luyen.engine.batch import PackedBatch
from luyen.engine.optim import MasterAdamW
from luyen.engine.passes import Passes
from luyen.engine.share import Share, split
from luyen.engine.step import LOSS_WEIGHT, ShareUpdated, Updated, merge_updates, take_share_step
from luyen.models.policy import Policy


@final
class SupervisedEngine:
    """A policy, or this rank's shards of it, its optimizer, and how passes are cut."""

    def __init__(
        self,
        policy: Policy,
        optimizer: MasterAdamW,
        passes: Passes,
        *,
        aggregation: str,
        device: torch.device | None = None,
    ) -> None:
        """`device` is where passes run, if not where the weights are (they may be offloaded)."""
        self.policy = policy
        self.optimizer = optimizer
        self.passes = passes
        self.aggregation = aggregation
        self._device = device

    def prepare_update(self, batch: PackedBatch) -> PackedBatch:
        """The batch with the weight of every token in the loss of the whole optimizer step."""
        return batch.with_streams(
            **{LOSS_WEIGHT: aggregation_weights(self.aggregation, batch.layout)}
        )

    def update(self, batch: PackedBatch, *, lr: float) -> Updated:
        """One optimizer step on the whole batch, whatever the micro-batches are."""
        (share,) = shares = split(self.prepare_update(batch), self.passes, ranks=1)
        return merge_updates(shares, [self.update_share(share, lr=lr)])

    def update_share(self, share: Share, *, lr: float) -> ShareUpdated:
        """This rank's part of an optimizer step on a batch that `prepare_update` has seen."""

        def part_loss(part: PackedBatch, place: Tensor) -> tuple[Tensor, Mapping[str, Average]]:
            del place
            scored = self.policy(part.tokens, part.lengths, part.layout.mask)
            loss = negative_log_likelihood(part.scatter(scored.logp), part.layout)
            return (part.streams[LOSS_WEIGHT] * loss.per_token).sum(), loss.metrics

        home, here = share.batch.tokens.device, share.to(self._device or self.policy.device)
        return take_share_step(self.policy, self.optimizer, here, part_loss, lr=lr).to(home)
