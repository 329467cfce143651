"""Protocol of offline stages: batches, updates, validation, state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch

from luyen.base.rundir import RunDirectory
from luyen.config.schema.run import RunConfig
from luyen.data.formats.detect import Kind
from luyen.data.offline import OfflineData
from luyen.data.tokenizer import Tokenizer
from luyen.engine.batch import OfflineBatch
from luyen.engine.step import UpdateResult
from luyen.telemetry.display import Display

VALIDATION = "val_"
"""Prefix of metric names measured on validation rows."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """A metric that summarises a stage.

    Example:
        >>> Goal(metric="sft/val_nll", label="negative log-likelihood").metric
        'sft/val_nll'
    """

    metric: str
    """Name of the metric."""
    label: str
    """Label in the summary of a run."""


class OfflineStage(Protocol):
    """Packs rows into batches, runs optimizer steps on them, and validates."""

    @property
    def device(self) -> torch.device:
        """Where passes run."""
        ...

    @property
    def goals(self) -> tuple[Goal, ...]:
        """Metrics for the summary; the first that was measured is shown."""
        ...

    def offline_batch(self, rows: Sequence[int]) -> OfflineBatch:
        """Pack the training rows at these indices; depends on the rows only."""
        ...

    def update(self, offline_batch: OfflineBatch, *, step: int, lr: float) -> UpdateResult:
        """One optimizer step on the whole batch; `step` addresses its random numbers, if any."""
        ...

    def measure(self) -> dict[str, float]:
        """Validation metrics of the current weights; empty without validation rows."""
        ...

    def state(self) -> dict[str, Any]:
        """State for a checkpoint, by part: weights, optimizer, plain values."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Copy the state that `state` of another stage returned."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """What a stage is built from.

    Example:
        >>> sorted(StageContext.__slots__)
        ['config', 'data', 'device', 'directory', 'display', 'tokenizer']
    """

    config: RunConfig
    """The whole configuration."""
    data: OfflineData[Any]
    """Rows of the stage's kinds."""
    tokenizer: Tokenizer
    """The policy's."""
    device: str
    """Device of the weights."""
    directory: RunDirectory | None
    """Run directory that caches slow preparations; None: they are not cached."""
    display: Display
    """Shows progress of slow preparations."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """Row formats and builder of a stage.

    Example:
        >>> sorted(StageKind.__slots__)
        ['build', 'columns', 'kinds']
    """

    kinds: Callable[[RunConfig], tuple[Kind, ...]]
    """Accepted row formats."""
    columns: Callable[[RunConfig], tuple[str, ...]] = lambda _: ()
    """Further columns that matter for training, so that rows differing in them are distinct."""
    build: Callable[[StageContext], OfflineStage]
    """Builds the stage in its initial state."""


def validation_names(found: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step under their validation names.

    Example:
        >>> validation_names({"preference/accuracy": 0.5})
        {'preference/val_accuracy': 0.5}
    """
    return {name.replace("/", f"/{VALIDATION}", 1): value for name, value in found.items()}
