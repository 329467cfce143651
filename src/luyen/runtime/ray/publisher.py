"""Weight synchronisation: the ranks' weights to the replicas, proved before anything is generated.

Ranks digest and gather their weights, replicas load them. What replicas must hold is known from the
digests of the ranks' own shards, so that nothing on the way is trusted.
"""

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import final

from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.publish import Published, publish_beside
from luyen.runtime.ray.ranks import RankGroup
from luyen.runtime.ray.weights import GatheredWeights, Gathering

_ACTOR = "actor/"


@final
class OnTheWay:
    """A publication in progress: ranks gather the weights, and replicas are to load them."""

    def __init__(self, publisher: "Publisher", version: int, gathering: Gathering) -> None:
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
class Publisher:
    """Which weights the replicas hold, and how newer ones get there."""

    def __init__(self, ranks: RankGroup, engines: RayEngines) -> None:
        """The ranks' watch hears of every publication."""
        self._ranks = ranks
        self._engines = engines
        self._pending: OnTheWay | None = None
        self.newest: Published | None = None
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

    def begin(self, version: int, gathering: Gathering | None = None) -> OnTheWay:
        """Let ranks gather their weights, unless they do already (`gathering` waits for them).

        Replicas that are asked from now on generate with these weights, once they hold them.
        """
        assert self._engines.is_idle, "weights would change in the middle of an answer"
        coming = OnTheWay(self, version, gathering or self._ranks.begin_publish())
        self._engines.crew.begin_publication(version, holder=self._ranks.look)
        self.newest, self._pending = None, coming
        return coming

    def complete(self, coming: OnTheWay) -> None:
        """Send what ranks have gathered, and return when every replica holds it."""
        assert coming is self._pending, "other weights have come since"
        crew, gathered = self._engines.crew, coming.gathering()
        started = time.monotonic() - gathered.seconds
        crew.send_all(gathered.parts, _of_policy(gathered))
        crew.wait_until(lambda: crew.is_published)
        done = Published(
            version=coming.version,
            replicas=sum(member.is_ready for member in crew.members),
            bytes=gathered.bytes,
            seconds=crew.confirmed - started,
        )
        self._keep(done, gathered, ago=time.monotonic() - crew.confirmed)

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
        done = await publish_beside(
            self._engines,
            gathered.parts,
            version=version,
            keep=keep,
            expected=expected,
            holder=self._ranks.look,
        )
        seconds = time.monotonic() - start
        self._keep(replace(done, bytes=gathered.bytes, seconds=seconds), gathered)

    def _keep(self, done: Published, gathered: GatheredWeights, *, ago: float = 0.0) -> None:
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
