"""The micro-batch loop: forward, loss, backward, for every part of one optimizer step.

The losses of all parts sum to the loss of the step, so gradients add up over the passes of a rank
and over ranks. This is the only module that calls `backward`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias, final

import torch
from torch import Tensor, nn

from luyen.algorithms.aggregation import Average
from luyen.algorithms.expert_balance import load_metrics
from luyen.base.heartbeat import beat
from luyen.engine.batch import BatchShard, PackedBatch
from luyen.engine.fsdp import dummy_loss
from luyen.engine.optim import MasterOptimizer, OptimizerStep

PartLoss: TypeAlias = Callable[[PackedBatch, Tensor], tuple[Tensor, Mapping[str, Average]]]
"""`(part, index of its tokens in the shard) -> (its term of the loss, metrics that merge)`."""

LOSS_WEIGHT = "loss_weight"
"""Stream: weight of each token in the loss of the whole optimizer step, over all ranks."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateResult:
    """Result of one optimizer step.

    Example:
        >>> stepped = OptimizerStep(grad_norm=1.0, is_applied=True, lr=0.1)
        >>> UpdateResult(stepped=stepped, metrics={}).metrics
        {}
    """

    stepped: OptimizerStep
    """Norm, learning rate, and whether it was applied."""
    metrics: Mapping[str, float]
    """Means over the trainable tokens of the step."""
    logp: Tensor | None = None
    """`[tok]` log-probabilities before the step, of a policy's update that measured them."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardUpdateResult:
    """One rank's result of an optimizer step; `merge_updates` combines those of all ranks.

    Example:
        >>> stepped = OptimizerStep(grad_norm=1.0, is_applied=True, lr=0.1)
        >>> ShardUpdateResult(stepped=stepped, averages={}).logp is None
        True
    """

    stepped: OptimizerStep
    """Norm, learning rate, and whether it was applied: the same on every rank."""
    averages: Mapping[str, Average]
    """Sums and counts over the trainable tokens of the shard."""
    logp: Tensor | None = None
    """`[tok]` log-probabilities of the shard's tokens before the step, if they were measured."""
    expert_counts: Tensor | None = None
    """`[layer, expert]` choices of each expert of a mixture, for the shard's tokens."""

    def to(self, device: torch.device) -> "ShardUpdateResult":
        """The record with its tensors on a device."""
        averages = {
            name: Average(total=a.total.to(device), count=a.count.to(device))
            for name, a in self.averages.items()
        }
        logp = None if self.logp is None else self.logp.to(device)
        counts = None if self.expert_counts is None else self.expert_counts.to(device)
        return replace(self, averages=averages, logp=logp, expert_counts=counts)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle all averages as two tensors: forty single ones take a millisecond."""
        found = self.averages.values()
        totals, counts = _stack_columns([a.total for a in found], [a.count for a in found])
        rest = self.logp, self.expert_counts
        return _unstack_columns, (self.stepped, tuple(self.averages), totals, counts, *rest)


def _stack_columns(*columns: list[Tensor]) -> list[Tensor | list[Tensor]]:
    """Each column as one tensor, if its numbers have one dtype."""
    return [
        torch.stack(column) if len({number.dtype for number in column}) == 1 else column
        for column in columns
    ]


def _unstack_columns(
    stepped: OptimizerStep,
    names: Sequence[str],
    totals: Iterable[Tensor],
    counts: Iterable[Tensor],
    logp: Tensor | None,
    expert_counts: Tensor | None,
) -> ShardUpdateResult:
    columns = zip(names, totals, counts, strict=True)
    averages = {name: Average(total=total, count=count) for name, total, count in columns}
    return ShardUpdateResult(
        stepped=stepped, averages=averages, logp=logp, expert_counts=expert_counts
    )


class RowLearner(Protocol):
    """Learns from given rows: a model, or this rank's shards of it, and its optimizer."""

    @property
    def model(self) -> nn.Module:
        """What learns."""
        ...

    @property
    def optimizer(self) -> MasterOptimizer:
        """Its optimizer."""
        ...

    def score_shard(
        self, shard: BatchShard, *, dropout_key: int | None = None
    ) -> dict[str, Tensor]:
        """Streams over the tokens of a shard, without gradients.

        With a `dropout_key` passes have the masks of an update with this key.
        """
        ...

    def update_shard(
        self, shard: BatchShard, *, lr: float, dropout_key: int | None = None
    ) -> ShardUpdateResult:
        """This rank's part of an optimizer step on a batch with the stream `LOSS_WEIGHT`.

        `dropout_key` decides the masks of an adapter's dropout, where there is any.
        """
        ...


class BatchLearner(Protocol):
    """A `RowLearner` for whole batches, wherever and on however many ranks it is."""

    def scores(self, batch: PackedBatch, *, dropout_key: int | None = None) -> dict[str, Tensor]:
        """Streams over the tokens of a batch, without gradients; `dropout_key` as for `update`."""
        ...

    def update(
        self, batch: PackedBatch, *, lr: float, dropout_key: int | None = None
    ) -> UpdateResult:
        """One optimizer step on a batch with the stream `LOSS_WEIGHT`."""
        ...


def take_shard_step(
    model: nn.Module,
    optimizer: MasterOptimizer,
    shard: BatchShard,
    part_loss: PartLoss,
    *,
    lr: float,
    dummy: Callable[[], Tensor] | None = None,
) -> ShardUpdateResult:
    """One optimizer step on the whole batch, of which this rank computes a shard.

    `dummy` is the loss of a dummy pass, where `part_loss` calls further sharded models.
    """
    model.train()
    dummy = dummy or partial(dummy_loss, model, shard.batch.tokens.device)
    merged: dict[str, Average] = {}
    for indices in shard.passes:
        if not indices:
            dummy().backward()
            continue
        place = shard.batch.positions(indices)
        part = shard.batch.take(indices, place)
        loss, metrics = part_loss(part, place)
        loss.backward()
        beat()
        for name, average in metrics.items():
            merged[name] = merged[name].merge(average) if name in merged else average
    stepped = optimizer.step(lr)
    model.eval()
    return ShardUpdateResult(stepped=stepped, averages=merged)


def merge_updates(shards: Sequence[BatchShard], done: Sequence[ShardUpdateResult]) -> UpdateResult:
    """Combine the results of all ranks: metrics are means over all tokens of the step."""
    first, *rest = (one.stepped for one in done)
    assert all(one.is_applied == first.is_applied for one in rest), "ranks took different steps"
    merged: dict[str, Average] = {}
    for one in done:
        for name, average in one.averages.items():
            merged[name] = merged[name].merge(average) if name in merged else average
    values = {name: average.value() for name, average in merged.items()}
    counts = [one.expert_counts for one in done if one.expert_counts is not None]
    if counts:
        values |= load_metrics(torch.stack(counts).sum(0))
    measured = [one.logp for one in done if one.logp is not None]
    logp = _join_streams(shards, measured) if measured else None
    return UpdateResult(stepped=first, metrics=values, logp=logp)


def _join_streams(shards: Sequence[BatchShard], parts: Sequence[Tensor]) -> Tensor:
    if len(shards) == 1:
        return parts[0]
    device = shards[0].positions.device
    whole = torch.zeros(sum(len(shard.positions) for shard in shards), device=device)
    for shard, part in zip(shards, parts, strict=True):
        whole[shard.positions] = part.to(device)
    return whole
