"""The critic's training engine: values of every token, and optimizer steps on the value loss."""

from collections.abc import Mapping
from typing import final

import torch
from torch import Tensor

from luyen.algorithms.aggregation import aggregation_weights
from luyen.algorithms.statistic import Average
from luyen.algorithms.value import value_loss
from luyen.engine.batch import PackedBatch
from luyen.engine.optim import MasterAdamW
from luyen.engine.passes import Passes
from luyen.engine.step import Updated, take_step
from luyen.models.value import ValueModel


@final
class CriticEngine:
    """One value model on one device, its optimizer, and how passes are cut."""

    def __init__(
        self,
        model: ValueModel,
        optimizer: MasterAdamW,
        passes: Passes,
        *,
        cliprange_value: float | None,
        aggregation: str,
        loss_scale_factor: float | None,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.passes = passes
        self.cliprange_value = cliprange_value
        self.aggregation = aggregation
        self.loss_scale_factor = loss_scale_factor

    @torch.no_grad()
    def values(self, batch: PackedBatch) -> Tensor:
        """Value before each trainable token, 0 elsewhere."""
        stream = torch.zeros(batch.tokens.shape, device=batch.tokens.device)
        for indices in self.passes.of(batch.lengths, batch.labels()):
            part = batch.take(indices)
            found = self.model(part.tokens, part.lengths, part.layout.mask)
            stream[batch.positions(indices)] = part.scatter(found)
        return stream

    def update(self, batch: PackedBatch, *, lr: float) -> Updated:
        """One optimizer step; reads the streams `values` and `returns`."""
        weights = aggregation_weights(
            self.aggregation, batch.rollouts, loss_scale_factor=self.loss_scale_factor
        )

        def part_loss(part: PackedBatch, place: Tensor) -> tuple[Tensor, Mapping[str, Average]]:
            loss = value_loss(
                part.scatter(self.model(part.tokens, part.lengths, part.layout.mask)),
                part.streams["values"],
                part.streams["returns"],
                part.layout,
                cliprange_value=self.cliprange_value,
            )
            weighted = weights[place] * loss.per_token
            mean = Average(total=weighted.detach().sum(), count=weights[place].sum())
            return weighted.sum(), {**loss.metrics, "critic/vf_loss": mean}

        return take_step(self.model, self.optimizer, batch, self.passes, part_loss, lr=lr)
