"""Weight sync from ranks to replicas, each confirmed by digests before it generates.

Ranks digest and gather their weights, replicas load them. What replicas must hold is known from the
digests of the ranks' own shards, so that nothing on the way is trusted.
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
from luyen.models.trained_weights import tensor_digests
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

# Weights from the trainer to every replica, confirmed before anything is drawn with them.

_LOOK_S = 0.005
"""Between two looks whether replicas have confirmed, while others draw."""
Bucket: TypeAlias = "Mapping[str, Tensor] | ObjectRef[PackedWeights] | Path"
"""Some parameters: here, packed in the object store by whoever has them, or in a file."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PublicationResult:
    """What a publication took.

    Example:
        >>> PublicationResult(version=1, replicas=2, bytes=8, seconds=0.1).bytes
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
) -> PublicationResult:
    """Give every replica all parameters that learn, and wait until each holds exactly them.

    Replicas load a bucket while the next is made. Without a `folder` buckets go through the object
    store; with one, through files in it that every node must see. `expected` are the digests
    (`luyen.models.trained_weights.tensor_digests`) of all parameters; they must be given where
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
    assert digests or expected is not None, "nobody said what the replicas are to hold"
    engines.replica_pool.end_publication(digests if expected is None else expected)
    if here is not None:
        _remove_others(here)
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
    """Give every replica one more version of the weights; those to be kept go on drawing.

    Returns when each that can work holds exactly the expected ones. `holder` raises if whoever has
    the parts is lost.
    """
    start = time.monotonic()
    engines.replica_pool.begin_publication(version, keep=keep, holder=holder)
    for part in parts:
        engines.replica_pool.send_part(part)
    engines.replica_pool.expect(expected)
    while not engines.replica_pool.is_published:
        engines.replica_pool.receive(0.0)
        await asyncio.sleep(_LOOK_S)
    return PublicationResult(
        version=version,
        replicas=sum(member.is_ready for member in engines.replica_pool.members),
        bytes=0,
        seconds=time.monotonic() - start,
    )


def _part(bucket: Bucket, folder: Path | None, number: int) -> "ObjectRef[PackedWeights] | Path":
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


_ACTOR = "actor/"


@final
class PendingSync:
    """A publication in progress: ranks gather the weights, and replicas are to load them."""

    def __init__(self, publisher: "WeightSync", version: int, gathering: Gathering) -> None:
        """`gathering` waits for the ranks."""
        self.version = version
        self.gathering = gathering
        self._publisher = publisher
        self._is_done = False

    def wait(self) -> None:
        """Return when every replica has proved that it holds the weights."""
        if not self._is_done:
            self._publisher.complete(self)
            self._is_done = True


@final
class WeightSync:
    """Which weights the replicas hold, and how newer ones get there."""

    def __init__(self, ranks: RankGroup, engines: RayEngines) -> None:
        """The ranks' watch hears of every publication."""
        self._ranks = ranks
        self._engines = engines
        self._pending: PendingSync | None = None
        self.newest: PublicationResult | None = None
        """The newest publication that is complete."""
        self.digests: Mapping[str, str] | None = None
        """Digests of all that learns, as the newest publication gathered them.

        None: no publication is complete, or the ranks have taken a step since.
        """

    def forget(self) -> None:
        """The ranks hold other weights than they did: those of a checkpoint."""
        self.newest = self._pending = self.digests = None

    def change(self) -> None:
        """The ranks take a step: what is known of their weights is outdated."""
        self.digests = None

    def begin(self, version: int, gathering: Gathering | None = None) -> PendingSync:
        """Let ranks gather their weights, unless they do already (`gathering` waits for them).

        Replicas that are asked from now on generate with these weights, once they hold them.
        """
        assert self._engines.is_idle, "weights would change in the middle of an answer"
        coming = PendingSync(self, version, gathering or self._ranks.begin_publish())
        self._engines.replica_pool.begin_publication(version, holder=self._ranks.look)
        self.newest, self._pending = None, coming
        return coming

    def complete(self, coming: PendingSync) -> None:
        """Send what ranks have gathered, and return when every replica holds it."""
        assert coming is self._pending, "other weights have come since"
        replica_pool, gathered = self._engines.replica_pool, coming.gathering()
        started = time.monotonic() - gathered.seconds
        replica_pool.send_all(gathered.parts, _of_policy(gathered))
        replica_pool.wait_until(lambda: replica_pool.is_published)
        done = PublicationResult(
            version=coming.version,
            replicas=sum(member.is_ready for member in replica_pool.members),
            bytes=gathered.bytes,
            seconds=replica_pool.confirmed - started,
        )
        self._keep(done, gathered, ago=time.monotonic() - replica_pool.confirmed)

    def demand(self, version: int) -> None:
        """Fail unless this is the version that replicas hold, or that is on its way to them."""
        found = self._pending or self.newest
        assert found is not None, "no weights were published"
        assert found.version == version, f"version {found.version} was published, not {version}"

    async def place(self, version: int, keep: Collection[int]) -> None:
        """Publish the ranks' weights beside those that are kept, while replicas generate."""
        start = time.monotonic()
        gathered = await asyncio.to_thread(self._ranks.begin_publish())
        expected = _of_policy(gathered)
        done = await publish_extra_version(
            self._engines,
            gathered.parts,
            version=version,
            keep=keep,
            expected=expected,
            holder=self._ranks.look,
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
    """What replicas are to hold: of the digests of all that learns, those of the policy."""
    return {
        name.removeprefix(_ACTOR): digest
        for name, digest in gathered.digests.items()
        if name.startswith(_ACTOR)
    }


# Digests of what ranks hold, each rank's parts added up.


@final
class RankWeightDigests:
    """Digests that ranks compute of their shards, after all that they were called for before."""

    def __init__(self, ranks: RankGroup, published: Mapping[str, str] | None) -> None:
        """`published` are the digests of the weights, where a publication has gathered them."""
        self._ranks = ranks
        self._published = published

    def weights(self) -> Mapping[str, str]:
        """Parameters that learn, and their masters where they have any."""
        return self._weights

    @cached_property
    def _weights(self) -> Mapping[str, str]:
        return self._published or merge_sums(self._ranks.all("weight_sums"))

    def moments(self) -> Mapping[str, str]:
        """First moments of the optimizers."""
        return merge_sums(self._ranks.all("moment_sums"))
