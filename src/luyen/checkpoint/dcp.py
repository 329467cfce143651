"""Torch's distributed checkpoint (DCP) over our files: what each rank writes and reads."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor
from torch.futures import Future

from luyen.base.errors import UserError
from luyen.checkpoint.file_writers import FileWriter
from luyen.checkpoint.shards import (
    INDEX,
    Box,
    Part,
    ShardIndex,
    StoredTensor,
    index_text,
    read_boxes,
    shard_name,
    tied_names,
)


def save_together(
    folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None, writes: FileWriter
) -> None:
    """Every rank writes its share; rank 0 writes the index."""
    # Rank 0 holds a part of every tensor that has elements, so it sees what is tied.
    tied = [tied_names({name: _local(tensor) for name, tensor in tensors.items()})]
    dist.broadcast_object_list(tied, group=group, group_src=0)
    own = {name: tensor for name, tensor in tensors.items() if name not in tied[0]}
    writer = ShardWriter(folder, writes, rank=dist.get_rank(group), aliases=tied[0])
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    try:
        state_dict_saver.save(own, storage_writer=writer, planner=planner, process_group=group)
    except CheckpointException as error:
        raise _cause(error) from error


def load_together(
    folder: Path, index: ShardIndex, into: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> None:
    """Every rank reads what its tensors hold, and no more."""
    reader = ShardReader(folder, index)
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    tensors = dict(into)
    try:
        state_dict_loader.load(tensors, storage_reader=reader, planner=planner, process_group=group)
    except CheckpointException as error:
        raise _cause(error) from error


def _local(tensor: Tensor) -> Tensor:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _cause(error: CheckpointException) -> BaseException:
    """What went wrong on the first rank that failed."""
    found: list[BaseException] = [failure[0] for _, failure in sorted(error.failures.items())]
    return next((e for e in found if isinstance(e, OSError | UserError)), error)


@final
class ShardWriter(StorageWriter):
    """Writes the parts that DCP gives to this rank; rank 0 writes the index."""

    def __init__(
        self, folder: Path, writes: FileWriter, *, rank: int, aliases: Mapping[str, str]
    ) -> None:
        self._folder = folder
        self._writes = writes
        self._file = shard_name(rank)
        self._aliases = aliases

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One object writes one checkpoint."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """The folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Nothing to add."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's parts into its file; the results say where each lies."""
        parts: dict[str, Tensor] = {}
        results: list[WriteResult] = []
        for item in plan.items:
            data = planner.resolve_data(item)
            assert isinstance(data, Tensor), f"{item.index.fqn} is no tensor"
            offsets = tuple(item.index.offset or ())
            box = Box(
                offsets=offsets,
                sizes=tuple(data.shape),
                file=self._file,
                key=f"{item.index.fqn}@{','.join(map(str, offsets))}",
            )
            parts[box.key] = data
            results.append(
                WriteResult(index=item.index, size_in_bytes=data.nbytes, storage_data=box)
            )
        if parts:
            self._writes.tensors(self._folder / self._file, parts)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index, from what every rank wrote."""
        boxes: dict[str, list[Box]] = {}
        for result in (result for of_rank in results for result in of_rank):
            boxes.setdefault(result.index.fqn, []).append(result.storage_data)
        stored: dict[str, StoredTensor] = {}
        for name, kept in metadata.state_dict_metadata.items():
            assert isinstance(kept, TensorStorageMetadata), f"{name} is no tensor"
            ordered = tuple(sorted(boxes.get(name, []), key=lambda box: box.offsets))
            stored[name] = StoredTensor(
                dtype=kept.properties.dtype, shape=tuple(kept.size), boxes=ordered
            )
        index = ShardIndex(stored=stored, aliases=self._aliases)
        self._writes.text(self._folder / INDEX, index_text(index))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """No name is looked up: the folder is given."""
        return False


@final
class ShardReader(StorageReader):
    """Reads the parts that this rank holds, from whatever parts were written."""

    def __init__(self, folder: Path, index: ShardIndex) -> None:
        self._folder = folder
        self._names = index.names()
        self._places = {
            MetadataIndex(name, torch.Size(box.offsets)): box
            for name, stored in self._names.items()
            for box in stored.boxes
        }

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """One object reads one checkpoint."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:  # noqa: ARG002
        """The index in DCP's words; further names of a tensor are tensors of their own here."""
        described: dict[str, Any] = {}
        for name, stored in self._names.items():
            chunks = [
                ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                for box in stored.boxes
            ]
            described[name] = TensorStorageMetadata(
                TensorProperties(dtype=stored.dtype), torch.Size(stored.shape), chunks
            )
        return Metadata(state_dict_metadata=described)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """The index is read already."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Nothing to add."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copy what the plan names into this rank's tensors."""

        def wanted() -> Iterator[Part]:
            for item in plan.items:
                pairs = zip(item.storage_offsets, item.lengths, strict=True)
                part = tuple(slice(offset, offset + length) for offset, length in pairs)
                yield self._places[item.storage_index], part, planner.resolve_tensor(item)

        with torch.no_grad():
            read_boxes(self._folder, wanted())
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:  # noqa: ARG003
        """No name is looked up: the folder is given."""
        return False
