"""The micro-batch loop: forward, loss, backward, for every part of one optimizer step.

A part's loss is its share of the step's loss, so gradients simply add up. This is the only place
where a backward pass is started.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

from torch import Tensor, nn

from luyen.algorithms.statistic import Average
from luyen.engine.batch import PackedBatch
from luyen.engine.optim import MasterAdamW, Stepped
from luyen.engine.passes import Passes

PartLoss: TypeAlias = Callable[[PackedBatch, Tensor], tuple[Tensor, Mapping[str, Average]]]
"""`(part, index of its tokens in the step) -> (its share of the loss, metrics that merge)`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Updated:
    """What one optimizer step did.

    Example:
        >>> Updated(stepped=Stepped(grad_norm=1.0, is_applied=True, lr=0.1), metrics={}).metrics
        {}
    """

    stepped: Stepped
    """Norm, learning rate, and whether it was applied."""
    metrics: Mapping[str, float]
    """Means over the trainable tokens of the step."""


def take_step(
    model: nn.Module,
    optimizer: MasterAdamW,
    batch: PackedBatch,
    passes: Passes,
    part_loss: PartLoss,
    *,
    lr: float,
) -> Updated:
    """One optimizer step on the whole batch, whatever the micro-batches are."""
    model.train()
    merged: dict[str, Average] = {}
    for indices in passes.of(batch.lengths, batch.labels()):
        loss, metrics = part_loss(batch.take(indices), batch.positions(indices))
        loss.backward()
        for name, average in metrics.items():
            merged[name] = merged[name].merge(average) if name in merged else average
    stepped = optimizer.step(lr)
    model.eval()
    values = {name: average.value() for name, average in merged.items()}
    return Updated(stepped=stepped, metrics=values)
