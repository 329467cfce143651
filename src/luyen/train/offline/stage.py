"""Protocol of offline stages: batches, updates, validation, state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import torch

from luyen.base.rundir import RunDirectory
from luyen.base.seeds import derive_key
from luyen.config.schema.run import RunConfig
from luyen.data.formats.detect import Kind
from luyen.data.offline import OfflineData
from luyen.data.tokenizer import Tokenizer
from luyen.engine.batch import OfflineBatch
from luyen.engine.fsdp import Shardable
from luyen.engine.logprobs import FrozenPolicy
from luyen.engine.step import UpdateResult
from luyen.models.policy import Policy
from luyen.runtime.offline import OfflineRoles, OfflineWorker
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
    def roles(self) -> OfflineRoles:
        """What learns, with its weights and optimizer."""
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

    def state(self) -> dict[str, dict[str, Any]]:
        """What a checkpoint keeps besides weights and optimizer: plain values, by part."""
        ...

    def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore what `state` of another stage returned."""
        ...


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What the models of a process are built from.

    Example:
        >>> [name for name in WorkerContext.__slots__ if name.startswith("on")]
        ['on_host']
    """

    config: RunConfig
    """The whole configuration."""
    tokenizer: Tokenizer
    """The policy's."""
    device: str
    """Device of the weights."""
    rank: int = 0
    """Number of the process among its ranks."""
    sharded: Callable[[Shardable], None] | None = None
    """Shards a model over the ranks; None: models are whole."""
    on_host: bool = False
    """Whether models are loaded into host memory, from which `sharded` moves their parts."""
    here: torch.device | None = None
    """Device of passes, if weights may be offloaded."""
    offloads_optimizer: bool = False
    """Whether the optimizer of whole weights is in host memory."""

    def frozen(self, policy: Policy) -> FrozenPolicy:
        """A policy that only scores, at temperature 1."""
        if self.sharded is not None:
            self.sharded(policy)
        return FrozenPolicy(policy=policy, temperature=1.0, device=self.here)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StageContext:
    """What a stage is built from.

    Example:
        >>> sorted(StageContext.__slots__)
        ['config', 'data', 'directory', 'display', 'roles', 'tokenizer']
    """

    config: RunConfig
    """The whole configuration."""
    data: OfflineData[Any]
    """Rows of the stage's kinds."""
    tokenizer: Tokenizer
    """The policy's."""
    roles: OfflineRoles
    """What learns, in its initial state."""
    directory: RunDirectory | None
    """Run directory that caches slow preparations; None: they are not cached."""
    display: Display
    """Shows progress of slow preparations."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """Row formats and builders of a stage.

    Example:
        >>> sorted(StageKind.__slots__)
        ['build', 'columns', 'kinds', 'worker']
    """

    kinds: Callable[[RunConfig], tuple[Kind, ...]]
    """Accepted row formats."""
    columns: Callable[[RunConfig], tuple[str, ...]] = lambda _: ()
    """Further columns that matter for training, so that rows differing in them are distinct."""
    worker: Callable[[WorkerContext], OfflineWorker]
    """Builds the models of a process."""
    build: Callable[[StageContext], OfflineStage]
    """Builds the stage over the workers."""


def dropout_key(seed: int, step: int) -> int:
    """What decides the masks of an adapter's dropout in a step.

    Example:
        >>> dropout_key(0, 1) != dropout_key(0, 2)
        True
    """
    return derive_key(seed, "adapter dropout", step)


def validation_names(found: Mapping[str, float]) -> dict[str, float]:
    """Metrics of a step under their validation names.

    Example:
        >>> validation_names({"preference/accuracy": 0.5})
        {'preference/val_accuracy': 0.5}
    """
    return {name.replace("/", f"/{VALIDATION}", 1): value for name, value in found.items()}
