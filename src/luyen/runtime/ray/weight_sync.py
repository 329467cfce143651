"""Weight sync from ranks to replicas, each confirmed by digests before it generates.

Ranks digest and gather their weights, replicas load and digest them. The expected digests are
computed from the ranks' own shards, so that every step of the transfer is verified.
"""

import asyncio
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TypeAlias, final

import ray
from ray import ObjectRef
from torch import Tensor

from luyen.engine.sharded_state import merge_sums
from luyen.models.weight_digests import tensor_digests
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.ranks import RankGroup
from luyen.runtime.weights import (
    GatheredWeights,
    Gathering,
    PackedWeights,
    pack,
    total_bytes,
    unpack,
    write_part,
)

_POLL_S = 0.005
"""Seconds between two polls for confirmations, while replicas generate."""
Bucket: TypeAlias = "Mapping[str, Tensor] | ObjectRef[PackedWeights] | Path"
"""Some parameters: tensors of this process, packed bytes in the object store, or a file."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationResult:
    """Result of a complete publication.

    Example:
        >>> PublicationResult(version=1, replicas=2, bytes=8, seconds=0.1).bytes
        8
    """

    version: int
    """Version of the weights."""
    replicas: int
    """Replicas that have confirmed them."""
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
) -> PublicationResult:
    """Send all trained parameters to every replica, and wait until each has confirmed them.

    Replicas load a bucket while the next is packed. Buckets go through the object store, or with a
    `folder` through files in it that every node must see. `expected` are the digests
    (`luyen.models.weight_digests.tensor_digests`) of all parameters; they must be given where
    buckets are not tensors of this process, and are those of the buckets otherwise. `holder` raises
    if the process that has the buckets is lost.
    """
    assert engines.is_idle, "weights would change in the middle of an answer"
    start, size = time.monotonic(), 0
    digests: dict[str, str] = {}
    here = None if folder is None else folder / f"version_{version:08d}"
    if here is not None:
        here.mkdir(parents=True, exist_ok=True)
    engines.replica_pool.begin_publication(version, holder=holder)
    for number, bucket in enumerate(buckets):
        if isinstance(bucket, Mapping):
            digests |= tensor_digests(bucket)
            size += total_bytes(bucket.values())
        engines.replica_pool.send_part(_part(bucket, here, number))
    assert digests or expected is not None, "the expected digests are not known"
    engines.replica_pool.end_publication(digests if expected is None else expected)
    if here is not None:
        _remove_earlier(here)
    return PublicationResult(
        version=version,
        replicas=sum(member.is_ready for member in engines.replica_pool.members),
        bytes=size,
        seconds=time.monotonic() - start,
    )


async def publish_extra_version(
    engines: RayEngines,
    parts: Sequence["ObjectRef[PackedWeights]"],
    *,
    version: int,
    keep: Collection[int],
    expected: Mapping[str, str],
    holder: Callable[[], None],
) -> PublicationResult:
    """Send one more version of the weights to every replica; generation with kept ones continues.

    Returns when every ready replica has confirmed the expected digests. `holder` raises if the
    process that stores the parts is lost.
    """
    start = time.monotonic()
    engines.replica_pool.begin_publication(version, keep=keep, holder=holder)
    for part in parts:
        engines.replica_pool.send_part(part)
    engines.replica_pool.expect(expected)
    while not engines.replica_pool.is_published:
        engines.replica_pool.receive(0.0)
        await asyncio.sleep(_POLL_S)
    return PublicationResult(
        version=version,
        replicas=sum(member.is_ready for member in engines.replica_pool.members),
        bytes=0,
        seconds=time.monotonic() - start,
    )


def _part(bucket: Bucket, folder: Path | None, number: int) -> "ObjectRef[PackedWeights] | Path":
    """A bucket in the form that replicas load."""
    if isinstance(bucket, Path):
        return bucket.absolute()
    if folder is None:
        return ray.put(pack(bucket)) if isinstance(bucket, Mapping) else bucket
    tensors = bucket if isinstance(bucket, Mapping) else unpack(ray.get(bucket))
    return write_part(folder.absolute() / f"part_{number:05d}.safetensors", tensors)


def _remove_earlier(kept: Path) -> None:
    """Remove the folders of earlier versions: restarted replicas load this one."""
    for version in kept.parent.glob("version_*"):
        if version != kept:
            shutil.rmtree(version)


_ACTOR = "actor/"


@final
class PendingSync:
    """A publication in progress: ranks gather the weights, then replicas load them."""

    def __init__(self, weight_sync: "WeightSync", version: int, gathering: Gathering) -> None:
        """`gathering` waits for the ranks."""
        self.version = version
        self.gathering = gathering
        self._weight_sync = weight_sync
        self._is_done = False

    def wait(self) -> None:
        """Return when every ready replica has confirmed the weights."""
        if not self._is_done:
            self._weight_sync.complete(self)
            self._is_done = True


@final
class WeightSync:
    """Publishes the ranks' weights to the replicas, and knows which version those have."""

    def __init__(self, ranks: RankGroup, engines: RayEngines) -> None:
        """Every complete publication is recorded in the monitor of the ranks."""
        self._ranks = ranks
        self._engines = engines
        self._pending: PendingSync | None = None
        self.newest: PublicationResult | None = None
        """The newest publication that is complete."""
        self.digests: Mapping[str, str] | None = None
        """Digests of every trained tensor, as the newest publication gathered them.

        None: no publication is complete, or the ranks have taken a step since.
        """

    def forget(self) -> None:
        """Drop all state: the ranks have loaded a checkpoint."""
        self.newest = self._pending = self.digests = None

    def change(self) -> None:
        """Drop the digests: the ranks take an optimizer step."""
        self.digests = None

    def begin(self, version: int, gathering: Gathering | None = None) -> PendingSync:
        """Start a publication; ranks gather their weights, unless `gathering` has started that.

        Requests submitted from now on are generated with these weights, once confirmed.
        """
        assert self._engines.is_idle, "weights would change in the middle of an answer"
        sync = PendingSync(self, version, gathering or self._ranks.begin_publish())
        self._engines.replica_pool.begin_publication(version, holder=self._ranks.raise_if_lost)
        self.newest, self._pending = None, sync
        return sync

    def complete(self, sync: PendingSync) -> None:
        """Send the gathered weights, and return when every ready replica has confirmed them."""
        assert sync is self._pending, "a newer publication has started since"
        replica_pool, gathered = self._engines.replica_pool, sync.gathering()
        started = time.monotonic() - gathered.seconds
        replica_pool.send_all(gathered.parts, _of_policy(gathered))
        replica_pool.wait_until(lambda: replica_pool.is_published)
        done = PublicationResult(
            version=sync.version,
            replicas=sum(member.is_ready for member in replica_pool.members),
            bytes=gathered.bytes,
            seconds=replica_pool.confirmed_at - started,
        )
        self._keep(done, gathered, ago=time.monotonic() - replica_pool.confirmed_at)

    def demand(self, version: int) -> None:
        """Fail unless this is the version that was published last."""
        found = self._pending or self.newest
        assert found is not None, "no weights were published"
        assert found.version == version, f"version {found.version} was published, not {version}"

    async def publish_extra(self, version: int, keep: Collection[int]) -> None:
        """Publish the ranks' weights in addition to the kept versions, while replicas generate."""
        start = time.monotonic()
        gathered = await asyncio.to_thread(self._ranks.begin_publish())
        expected = _of_policy(gathered)
        done = await publish_extra_version(
            self._engines,
            gathered.parts,
            version=version,
            keep=keep,
            expected=expected,
            holder=self._ranks.raise_if_lost,
        )
        seconds = time.monotonic() - start
        self._keep(replace(done, bytes=gathered.bytes, seconds=seconds), gathered)

    def _keep(
        self, done: PublicationResult, gathered: GatheredWeights, *, ago: float = 0.0
    ) -> None:
        self.newest, self._pending, self.digests = done, None, gathered.digests
        self._ranks.watch.published(
            version=done.version,
            size=done.bytes,
            parameters=len(_of_policy(gathered)),
            seconds=done.seconds,
            ago=ago,
        )


def _of_policy(gathered: GatheredWeights) -> dict[str, str]:
    """Digests of the policy's parameters, which replicas must confirm."""
    return {
        name.removeprefix(_ACTOR): digest
        for name, digest in gathered.digests.items()
        if name.startswith(_ACTOR)
    }


@final
class RankWeightDigests:
    """Digests that ranks compute of their shards, after all earlier calls."""

    def __init__(self, ranks: RankGroup, published: Mapping[str, str] | None) -> None:
        """`published` are the digests of the weights, where a publication has gathered them."""
        self._ranks = ranks
        self._published = published

    def weights(self) -> Mapping[str, str]:
        """Trained parameters, and their fp32 masters where they have any."""
        return self._weights

    @cached_property
    def _weights(self) -> Mapping[str, str]:
        return self._published or merge_sums(self._ranks.all("weight_sums"))

    def moments(self) -> Mapping[str, str]:
        """First moments of the optimizers."""
        return merge_sums(self._ranks.all("moment_sums"))
