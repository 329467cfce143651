"""What an offline run learns, behind one protocol; the loop knows nothing else of it."""

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
"""What the name of a number begins with that was measured on held-out rows."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The number by which people judge a stage.

    Example:
        >>> Goal(metric="sft/val_nll", label="negative log-likelihood").metric
        'sft/val_nll'
    """

    metric: str
    """Its name among the metrics of a step, or of a measurement."""
    label: str
    """What it is called in the last words of a run."""


class OfflineStage(Protocol):
    """Rows as lessons, optimizer steps on them, and a measurement on rows that are held out."""

    @property
    def device(self) -> torch.device:
        """Where passes run."""
        ...

    @property
    def goals(self) -> tuple[Goal, ...]:
        """What to tell at the end; the first that was measured counts."""
        ...

    def offline_batch(self, rows: Sequence[int]) -> OfflineBatch:
        """The training rows at these places as tokens; nothing but the rows decides it."""
        ...

    def update(self, offline_batch: OfflineBatch, *, lr: float) -> UpdateResult:
        """One optimizer step on the whole lesson, whatever the micro-batches are."""
        ...

    def measure(self) -> dict[str, float]:
        """What the held-out rows say of the weights of now; nothing where there are none."""
        ...

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps, by part: weights, optimizer, and small numbers."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Stand where another stood whose `state` this was; it is copied."""
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
    """Rows of the kind that the stage asked for."""
    tokenizer: Tokenizer
    """The policy's."""
    device: str
    """Where weights are to be."""
    directory: RunDirectory | None
    """Where long preparations are kept; None: nowhere, they are made again."""
    display: Display
    """Who hears what takes long."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StageKind:
    """How a stage of one name is made.

    Example:
        >>> sorted(StageKind.__slots__)
        ['build', 'columns', 'kinds']
    """

    kinds: Callable[[RunConfig], tuple[Kind, ...]]
    """What its rows may be."""
    columns: Callable[[RunConfig], tuple[str, ...]] = lambda _: ()
    """Further columns that rows are learned from; those that differ in one are not the same."""
    build: Callable[[StageContext], OfflineStage]
    """The stage, at its beginning."""


def validation_names(found: Mapping[str, float]) -> dict[str, float]:
    """Numbers of a step under the names that they have on held-out rows.

    Example:
        >>> validation_names({"preference/accuracy": 0.5})
        {'preference/val_accuracy': 0.5}
    """
    return {name.replace("/", f"/{VALIDATION}", 1): value for name, value in found.items()}
