"""The critic's training engine: values of every token, and optimizer steps on the value loss."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from luyen.algorithms.aggregation import Average, aggregation_weights
from luyen.algorithms.value import value_loss
from luyen.base.heartbeat import beat
from luyen.engine.batch import BatchShard, MicroBatching, PackedBatch, join_shards, split_batch
from luyen.engine.fsdp import dummy_loss, reshard
from luyen.engine.optim import MasterOptimizer
from luyen.engine.sharded_state import (
    ShardSums,
    load_role,
    restore_role,
    role_state,
    role_weights,
    shard_sums,
)
from luyen.engine.step import (
    LOSS_WEIGHT,
    ShardUpdateResult,
    UpdateResult,
    merge_updates,
    take_shard_step,
)
from luyen.models.policy import ValueModel

_ROLE = "critic"
_VALUES = "values"


@final
class CriticEngine:
    """A value model, or this rank's shards of it, its optimizer, and its micro-batching."""

    def __init__(
        self,
        model: ValueModel,
        optimizer: MasterOptimizer,
        passes: MicroBatching,
        *,
        cliprange_value: float | None,
        aggregation: str,
        loss_scale_factor: float | None,
        device: torch.device | None = None,
    ) -> None:
        """`device` is where passes run, if not where the weights are (they may be offloaded)."""
        self.model = model
        self.optimizer = optimizer
        self.passes = passes
        self.cliprange_value = cliprange_value
        self.aggregation = aggregation
        self.loss_scale_factor = loss_scale_factor
        self._device = device

    @property
    def device(self) -> torch.device:
        """Where passes run."""
        return self._device or self.model.body.device

    def values(self, batch: PackedBatch) -> Tensor:
        """Value before each trainable token; 0 at the rest."""
        (shard,) = shards = split_batch(batch, self.passes, ranks=1)
        return join_shards(shards, [self.score_shard(shard)], batch)[_VALUES]

    @torch.no_grad()
    def score_shard(self, shard: BatchShard) -> dict[str, Tensor]:
        """The stream `values` over the tokens of a shard, on its device."""
        home, batch = shard.batch.tokens.device, shard.to(self.device).batch
        stream = torch.zeros(batch.tokens.shape, device=self.device)
        for indices in shard.passes:
            if not indices:
                dummy_loss(self.model, self.device)
                continue
            part = batch.take(indices)
            found = self.model(part.tokens, part.lengths, part.layout.mask)
            stream[batch.positions(indices)] = part.scatter(found)
            beat()
        reshard(self.model)
        return {_VALUES: stream.to(home)}

    def weight_sums(self, *, is_first: bool) -> ShardSums:
        """This rank's parts of the digests of trained weights and masters."""
        return shard_sums(role_weights(_ROLE, self.model, self.optimizer), is_first=is_first)

    def state(self) -> dict[str, Any]:
        """Parts of a checkpoint by name."""
        return role_state(_ROLE, self.model, self.optimizer)

    def load(self, folder: Path) -> None:
        """Load a checkpoint of any number of ranks."""
        load_role(folder, _ROLE, self.model, self.optimizer)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a copy of `state` in place, where the model is not sharded."""
        restore_role(state, _ROLE, self.model, self.optimizer)

    def prepare_update(self, batch: PackedBatch) -> PackedBatch:
        """The batch with the weight of every token in the loss of the whole optimizer step."""
        weights = aggregation_weights(
            self.aggregation, batch.rollouts, loss_scale_factor=self.loss_scale_factor
        )
        return batch.with_streams(**{LOSS_WEIGHT: weights})

    def update(self, batch: PackedBatch, *, lr: float) -> UpdateResult:
        """One optimizer step; reads the streams `values` and `returns`."""
        (shard,) = shards = split_batch(self.prepare_update(batch), self.passes, ranks=1)
        return merge_updates(shards, [self.update_shard(shard, lr=lr)])

    def update_shard(self, shard: BatchShard, *, lr: float) -> ShardUpdateResult:
        """This rank's part of an optimizer step on a batch from `prepare_update`."""

        def part_loss(part: PackedBatch, place: Tensor) -> tuple[Tensor, Mapping[str, Average]]:
            del place
            loss = value_loss(
                part.scatter(self.model(part.tokens, part.lengths, part.layout.mask)),
                part.streams[_VALUES],
                part.streams["returns"],
                part.layout,
                cliprange_value=self.cliprange_value,
            )
            weights = part.streams[LOSS_WEIGHT]
            weighted = weights * loss.per_token
            mean = Average(total=weighted.detach().sum(), count=weights.sum())
            return weighted.sum(), {**loss.metrics, "critic/vf_loss": mean}

        home, here = shard.batch.tokens.device, shard.to(self.device)
        return take_shard_step(self.model, self.optimizer, here, part_loss, lr=lr).to(home)
