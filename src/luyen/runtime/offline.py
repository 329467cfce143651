"""Training on given rows, with weights that are whole in this process or sharded over ranks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from luyen.base.seeds import mix
from luyen.checkpoint.writer import CheckpointWriter
from luyen.engine.batch import BatchShard, MicroBatching, PackedBatch, join_shards, split_batch
from luyen.engine.logprobs import FrozenPolicy
from luyen.engine.sharded_state import merge_sums, shard_sums
from luyen.engine.step import RowLearner, ShardUpdateResult, UpdateResult, merge_updates
from luyen.models.lora import adapter_off
from luyen.models.weights import export_parameters
from luyen.runtime.monitoring import RoleMonitor, TraceSpec, TraceTarget
from luyen.runtime.roles import WeightDigests
from luyen.runtime.training import Learner, RoleLearner
from luyen.runtime.worker import ModelWorker, WorkerGroup


@final
class OfflineWorker(ModelWorker):
    """What learns from given rows, and the reference it is compared with, of one process."""

    def __init__(
        self, *, learner: RowLearner, reference: FrozenPolicy | None = None, rank: int = 0
    ) -> None:
        """`reference` None with an adapter means the model with its adapter off."""
        super().__init__(rank=rank)
        self.learner = learner
        self._reference = reference

    @property
    def role(self) -> str:
        """That of what learns, in every stage."""
        return "actor"

    @property
    def device(self) -> torch.device:
        """That of the weights."""
        return next(self.learner.model.parameters()).device

    def scores(self, shard: BatchShard, *, dropout_key: int | None = None) -> dict[str, Tensor]:
        """The learner's streams over the tokens of a shard."""
        return self.learner.score_shard(shard, dropout_key=self._own(dropout_key))

    def reference_scores(self, shard: BatchShard) -> dict[str, Tensor]:
        """The same under the reference."""
        if self._reference is not None:
            return self._reference.score_shard(shard)
        with adapter_off(self.learner.model):
            return self.learner.score_shard(shard)

    @torch.no_grad()
    def reference_sums(self) -> dict[str, tuple[str, int]]:
        """This rank's parts of the digests of all weights of the reference."""
        frozen = self._reference
        model: nn.Module = self.learner.model if frozen is None else frozen.policy
        return shard_sums(export_parameters(model, frozen=True), is_first=self.rank == 0)

    def drop_reference(self) -> None:
        """Free the frozen reference: everything is computed that needs it."""
        self._reference = None

    def update(
        self, shard: BatchShard, *, lr: float, dropout_key: int | None = None
    ) -> ShardUpdateResult:
        """This rank's part of an optimizer step; each rank has other masks of dropout."""
        return self.learner.update_shard(shard, lr=lr, dropout_key=self._own(dropout_key))

    def _own(self, dropout_key: int | None) -> int | None:
        return mix(dropout_key, self.rank) if dropout_key is not None and self.rank else dropout_key

    def _learners(self) -> Iterator[Learner]:
        yield RoleLearner(name="actor", model=self.learner.model, optimizer=self.learner.optimizer)


@final
class OfflineRoles:
    """The learner of an offline stage, called with whole batches, which it splits over workers.

    Batches are on `device`. With one worker the shard is the batch.
    """

    def __init__(
        self,
        workers: WorkerGroup[OfflineWorker],
        passes: MicroBatching,
        *,
        watch: RoleMonitor | None = None,
        on_close: Sequence[Callable[[], object]] = (),
    ) -> None:
        """`watch` is the monitor of the workers' processes; None: they are in this one.

        `on_close` is called at the end, in order: it ends processes and frees devices.
        """
        self.workers = workers
        self.passes = passes
        self._watch = watch
        self._on_close = list(on_close)

    @property
    def device(self) -> torch.device:
        """The device that batches must be on."""
        return self.workers.device

    @property
    def traces(self) -> TraceTarget | None:
        """Processes that can be traced; None: there is only this one."""
        return None if self._watch is None else self

    def start_trace(self, trace: TraceSpec) -> None:
        """Start a trace in every worker."""
        self.workers.all(OfflineWorker.start_trace, trace)

    def stop_trace(self) -> None:
        """End the traces and write their files."""
        self.workers.all(OfflineWorker.stop_trace)

    def metrics(self) -> dict[str, float]:
        """Busy shares and memory of other processes since the last call; writes their spans."""
        return {} if self._watch is None else self._watch.numbers()

    def scores(self, batch: PackedBatch, *, dropout_key: int | None = None) -> dict[str, Tensor]:
        """The learner's streams over the tokens of a batch."""
        shards = self._split(batch)
        found = self.workers.each(OfflineWorker.scores, shards, dropout_key=dropout_key)
        return join_shards(shards, found, batch)

    def reference_scores(self, batch: PackedBatch) -> dict[str, Tensor]:
        """The same under the reference."""
        shards = self._split(batch)
        return join_shards(shards, self.workers.each(OfflineWorker.reference_scores, shards), batch)

    def reference_digests(self) -> dict[str, str]:
        """Digests of all weights of the reference."""
        return merge_sums(self.workers.all(OfflineWorker.reference_sums))

    def drop_reference(self) -> None:
        """Free the frozen reference: everything is computed that needs it."""
        self.workers.all(OfflineWorker.drop_reference)

    def update(
        self, batch: PackedBatch, *, lr: float, dropout_key: int | None = None
    ) -> UpdateResult:
        """One optimizer step on a batch with the weight of every token in its loss."""
        shards = self._split(batch)
        done = self.workers.each(OfflineWorker.update, shards, lr=lr, dropout_key=dropout_key)
        return merge_updates(shards, done)

    def weight_digests(self) -> WeightDigests:
        """Digests of every trained tensor, as it is now."""
        return WeightDigests(self.workers, None)

    def not_finite(self) -> list[str]:
        """Names of the tensors of a checkpoint that hold NaN or infinity."""
        found = self.workers.all(OfflineWorker.not_finite)
        return sorted({name for names in found for name in names})

    def save(
        self,
        writer: CheckpointWriter,
        step: int,
        *,
        parts: Mapping[str, Mapping[str, Any]],
        facts: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint of weights, optimizer and further parts by name."""
        self.workers.save(writer, step, parts=parts, facts=facts)

    def load(self, folder: Path) -> None:
        """Restore weights and optimizer, whatever number of ranks saved them."""
        self.workers.all(OfflineWorker.load, folder.absolute())

    def copy_from(self, other: "OfflineRoles") -> None:
        """Take weights and optimizer of other roles; both are whole, in this process."""
        (state,) = other.workers.all(OfflineWorker.state)
        self.workers.all(OfflineWorker.load_state, state)

    def close(self) -> None:
        """End processes and free devices, even if a part of it fails."""
        endings, self._on_close = self._on_close, []
        with ExitStack() as stack:
            for end in reversed(endings):
                stack.callback(end)

    def _split(self, batch: PackedBatch) -> list[BatchShard]:
        return split_batch(batch, self.passes, ranks=self.workers.shards)
