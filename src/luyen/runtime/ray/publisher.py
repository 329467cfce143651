"""The ranks' weights to the replicas: as soon as they are new, or when they are asked for.

New weights are on their way while the controller finishes a step: ranks digest and gather them as
soon as they have learned, and replicas load them. What they must hold is known from the digests of
the ranks' own shards, so that nothing on the way is trusted.
"""

import asyncio
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import final

from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.publish import Published, publish, publish_beside
from luyen.runtime.ray.ranks import RankGroup
from luyen.runtime.ray.weights import GatheredWeights, Gathering

_ACTOR = "actor/"


@final
class OnTheWay:
    """A publication that nobody has waited for yet."""

    def __init__(self, version: int, gathering: Gathering) -> None:
        self.version = version
        self.gathering = gathering
        """Waits for the ranks that gather it."""
        self.gathered: GatheredWeights | None = None
        """What they gave, once it was sent to replicas."""
        self.started = 0.0
        """When they began, by the monotonic clock of this process."""


@final
class Publisher:
    """Which weights the replicas hold, and how newer ones get there."""

    def __init__(self, ranks: RankGroup, engines: RayEngines) -> None:
        """The ranks' watch hears of every publication."""
        self._ranks = ranks
        self._engines = engines
        self._on_the_way: OnTheWay | None = None
        self._is_new = False
        self.newest: Published | None = None
        """The newest publication that was asked for."""

    def forget(self) -> None:
        """The ranks hold other weights than they did, of any version."""
        self.newest = self._on_the_way = None

    def change(self) -> None:
        """The ranks make a step: what is on the way is outdated."""
        self._on_the_way = None
        self._is_new = True

    @property
    def has_published(self) -> bool:
        """Whether replicas hold weights that were published, so that newer ones follow."""
        return self.newest is not None

    def begin(self, gathering: Gathering | None = None) -> OnTheWay | None:
        """Let ranks gather weights that are new; None: there are none to go to replicas.

        They do so after what they were called for before, or were told to already (`gathering`
        waits for them). What is asked from now on is drawn with these weights; nothing is, before
        they were sent.
        """
        if self.newest is None or not self._is_new:
            return None
        assert self._engines.is_idle, "weights would change in the middle of an answer"
        coming = OnTheWay(self.newest.version + 1, gathering or self._ranks.begin_publish())
        self._engines.crew.begin_publication(coming.version, holder=self._ranks.look)
        self.newest, self._on_the_way, self._is_new = None, coming, False
        return coming

    def send(self, coming: OnTheWay) -> Mapping[str, str]:
        """Wait for the ranks that gather, and let replicas load; digests of all that learns.

        Replicas hear what they are to hold, and draw with nothing else. Once is enough.
        """
        if coming.gathered is None:
            assert coming is self._on_the_way, "other weights have come since"
            gathered = coming.gathering()
            coming.started = time.monotonic() - gathered.seconds
            coming.gathered = gathered
            self._engines.crew.send_all(gathered.parts, _of_policy(gathered))
        return coming.gathered.digests

    def ensure(self, version: int) -> None:
        """Return when every replica holds this version, or draws nothing before it does.

        `hurry` sends what is on the way, and `settle` waits for it.
        """
        if self.newest is not None and self.newest.version == version:
            return
        coming = self._on_the_way
        if coming is None or coming.version != version:
            assert coming is None or version > coming.version, (
                f"version {version} has gone, {coming.version} is on the way"
            )
            self._publish(version)

    def hurry(self) -> None:
        """Somebody waits for answers: send what is on the way."""
        if self._on_the_way is not None:
            self.send(self._on_the_way)

    def wait(self) -> None:
        """Return when every replica holds what was sent."""
        coming, crew = self._on_the_way, self._engines.crew
        if coming is not None and coming.gathered is not None:
            crew.wait_until(lambda: crew.is_published)

    def settle(self) -> None:
        """Return when every replica holds what was sent, and count it as what they draw with."""
        self.wait()
        coming, crew = self._on_the_way, self._engines.crew
        if coming is None or coming.gathered is None:
            return
        done = Published(
            version=coming.version,
            replicas=sum(member.is_ready for member in crew.members),
            bytes=coming.gathered.bytes,
            seconds=crew.confirmed - coming.started,
        )
        self._keep(done, coming.gathered, ago=time.monotonic() - crew.confirmed)

    def _publish(self, version: int) -> None:
        start = time.monotonic()
        gathered = self._ranks.begin_publish()()
        expected = _of_policy(gathered)
        done = publish(
            self._engines,
            gathered.parts,
            version=version,
            expected=expected,
            holder=self._ranks.look,
        )
        seconds = time.monotonic() - start
        self._keep(replace(done, bytes=gathered.bytes, seconds=seconds), gathered)

    async def place(self, version: int, keep: Collection[int]) -> None:
        """Publish the ranks' weights beside those that are kept; drawing goes on meanwhile."""
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
        self.newest, self._on_the_way, self._is_new = done, None, False
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
