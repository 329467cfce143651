"""Weights from the trainer to every replica, confirmed before anything is drawn with them."""

import asyncio
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, final

import ray
from ray import ObjectRef
from torch import Tensor

from luyen.models.digest import describe
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.weights import Parcel, pack, size_of, unpack, write_part

_LOOK_S = 0.005
"""Between two looks whether replicas have confirmed, while others draw."""
Bucket: TypeAlias = "Mapping[str, Tensor] | ObjectRef[Parcel] | Path"
"""Some parameters: here, packed in the object store by whoever has them, or in a file."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """What a publication took.

    Example:
        >>> Published(version=1, replicas=2, bytes=8, seconds=0.1).bytes
        8
    """

    version: int
    """Version of the weights that the replicas draw with now."""
    replicas: int
    """Replicas that have confirmed it."""
    bytes: int
    """Bytes of the weights that passed through this process, counted once."""
    seconds: float
    """From the first bucket to the last confirmation."""


def publish(
    engines: RayEngines,
    buckets: Iterable[Bucket],
    *,
    version: int,
    expected: Mapping[str, str] | None = None,
    folder: Path | None = None,
    holder: Callable[[], None] | None = None,
) -> Published:
    """Give every replica all parameters that learn, and wait until each holds exactly them.

    Replicas load a bucket while the next is made. Without a `folder` buckets go through the object
    store; with one, through files in it that every node must see. `expected` are the digests
    (`luyen.models.digest.describe`) of all parameters; they must be given where buckets are not
    tensors of this process, and are those of the buckets otherwise. `holder` raises if whoever has
    the buckets is lost.
    """
    assert engines.is_idle, "weights would change in the middle of an answer"
    start, size = time.monotonic(), 0
    digests: dict[str, str] = {}
    here = None if folder is None else folder / f"version_{version:08d}"
    if here is not None:
        here.mkdir(parents=True, exist_ok=True)
    engines.crew.begin_publication(version, holder=holder)
    for number, bucket in enumerate(buckets):
        if isinstance(bucket, Mapping):
            digests |= describe(bucket)
            size += size_of(bucket.values())
        engines.crew.send_part(_part(bucket, here, number))
    assert digests or expected is not None, "nobody said what the replicas are to hold"
    engines.crew.end_publication(digests if expected is None else expected)
    if here is not None:
        _remove_others(here)
    return Published(
        version=version,
        replicas=sum(member.is_ready for member in engines.crew.members),
        bytes=size,
        seconds=time.monotonic() - start,
    )


async def publish_beside(
    engines: RayEngines,
    parts: Sequence["ObjectRef[Parcel]"],
    *,
    version: int,
    keep: Collection[int],
    expected: Mapping[str, str],
    holder: Callable[[], None],
) -> Published:
    """Give every replica one more version of the weights; those to be kept go on drawing.

    Returns when each that can work holds exactly the expected ones. `holder` raises if whoever has
    the parts is lost.
    """
    start = time.monotonic()
    engines.crew.begin_publication(version, keep=keep, holder=holder)
    for part in parts:
        engines.crew.send_part(part)
    engines.crew.expect(expected)
    while not engines.crew.is_published:
        engines.crew.receive(0.0)
        await asyncio.sleep(_LOOK_S)
    return Published(
        version=version,
        replicas=sum(member.is_ready for member in engines.crew.members),
        bytes=0,
        seconds=time.monotonic() - start,
    )


def _part(bucket: Bucket, folder: Path | None, number: int) -> "ObjectRef[Parcel] | Path":
    """A bucket as replicas take it."""
    if isinstance(bucket, Path):
        return bucket.absolute()
    if folder is None:
        return ray.put(pack(bucket)) if isinstance(bucket, Mapping) else bucket
    tensors = bucket if isinstance(bucket, Mapping) else unpack(ray.get(bucket))
    return write_part(folder.absolute() / f"part_{number:05d}.safetensors", tensors)


def _remove_others(kept: Path) -> None:
    """Earlier versions go: a replica that begins again takes this one."""
    for other in kept.parent.glob("version_*"):
        if other != kept:
            shutil.rmtree(other)
