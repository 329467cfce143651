"""The ranks' weights to the replicas: as soon as they are new, or when they are asked for.

New weights are on their way while the controller finishes a step: ranks gather them before they
digest what they hold, and replicas load them meanwhile. What they must hold is known from the
digests of the ranks' own shards, so that nothing on the way is trusted.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any, final

from luyen.engine.shard_sums import merged
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.publish import Published, publish, publish_beside
from luyen.runtime.ray.ranks import RankGroup

_ACTOR = "actor/"


@final
class _OnTheWay:
    """A publication that nobody has waited for yet."""

    def __init__(self, version: int, gathered: Callable[[], tuple[list[Any], int]]) -> None:
        self.version = version
        self.gathered = gathered
        """Waits for the ranks that gather it."""
        self.started = time.monotonic()
        self.size = 0
        """Bytes that were sent to replicas; 0: nothing was yet."""
        self.parameters = 0
        """Of so many it is known what they are to be."""


@final
class Publisher:
    """Which weights the replicas hold, and how newer ones get there."""

    def __init__(
        self,
        ranks: RankGroup,
        engines: RayEngines,
        *,
        note: Callable[[Published, int, float], None],
    ) -> None:
        """`note` hears of every publication: of how many parameters, over how many seconds ago."""
        self._ranks = ranks
        self._engines = engines
        self._note = note
        self._on_the_way: _OnTheWay | None = None
        self._is_new = False
        self.newest: Published | None = None
        """The newest publication that was asked for."""

    def forget(self) -> None:
        """The ranks hold other weights than they did, of any version."""
        self.newest = self._on_the_way = None

    def change(self) -> None:
        """The ranks have made a step: what is on the way is outdated."""
        self._on_the_way = None
        self._is_new = True

    def begin(self) -> None:
        """Let ranks gather weights that are new, before whatever else they are called for."""
        if self.newest is not None and self._is_new:
            gathered = self._ranks.begin_publish()
            self._on_the_way = _OnTheWay(self.newest.version + 1, gathered)
            self._is_new = False

    def send(self) -> None:
        """Wait for the ranks that gather, and let replicas load."""
        coming = self._on_the_way
        if coming is None or coming.size:
            return
        assert self._engines.is_idle, "weights would change in the middle of an answer"
        parts, coming.size = coming.gathered()
        crew = self._engines.crew
        self.newest = None  # from now on replicas let its weights go
        crew.begin_publication(coming.version)
        for part in parts:
            crew.send_part(part)
        crew.end_parts()

    def expect(self, weights: Mapping[str, str]) -> None:
        """Say what replicas are to hold: of the digests of all roles, those of the policy."""
        coming = self._on_the_way
        if coming is None or coming.parameters:
            return
        own = {
            name.removeprefix(_ACTOR): digest
            for name, digest in weights.items()
            if name.startswith(_ACTOR)
        }
        self._engines.crew.expect(own)
        coming.parameters = len(own)

    def ensure(self, version: int) -> None:
        """Return when every replica holds this version."""
        if self.newest is not None and self.newest.version == version:
            return
        coming = self._on_the_way
        assert coming is None or not coming.size or version >= coming.version, (
            f"version {version} has gone, {coming.version} is on the way"
        )
        if coming is None or coming.version != version or not coming.parameters:
            self._publish(version)
            return
        crew = self._engines.crew
        crew.wait_until(lambda: crew.is_published)
        ready = sum(member.is_ready for member in crew.members)
        seconds = crew.confirmed - coming.started
        done = Published(version=version, replicas=ready, bytes=coming.size, seconds=seconds)
        self._keep(done, coming.parameters, ago=time.monotonic() - crew.confirmed)

    def _publish(self, version: int) -> None:
        start = time.monotonic()
        parts, size, digests = self._gathered()
        done = publish(self._engines, parts, version=version, expected=digests)
        self._keep(replace(done, bytes=size, seconds=time.monotonic() - start), len(digests))

    async def place(self, version: int, keep: Collection[int]) -> None:
        """Publish the ranks' weights beside those that are kept; drawing goes on meanwhile."""
        start = time.monotonic()
        parts, size, digests = await asyncio.to_thread(self._gathered)
        done = await publish_beside(
            self._engines, parts, version=version, keep=keep, expected=digests
        )
        self._keep(replace(done, bytes=size, seconds=time.monotonic() - start), len(digests))

    def _gathered(self) -> tuple[list[Any], int, dict[str, str]]:
        """The ranks' weights of this moment: parts in the object store, bytes and digests."""
        gathered = self._ranks.begin_publish()
        sums = self._ranks.begin_all("weight_sums")
        parts, size = gathered()
        return parts, size, merged(sums())

    def _keep(self, done: Published, parameters: int, *, ago: float = 0.0) -> None:
        self.newest, self._on_the_way, self._is_new = done, None, False
        self._note(done, parameters, ago)
