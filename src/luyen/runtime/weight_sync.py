"""Weight sync from workers to engines: gather, send, confirm by digests, in this order.

Workers digest and gather their weights, engines load and digest them. The expected digests are
computed from the workers' own shards, so that every step of the transfer is verified.
"""

import asyncio
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol, final

from luyen.runtime.gpu_memory import MappedWeights
from luyen.runtime.monitoring import RoleMonitor
from luyen.runtime.weights import GatheredWeights, Gathering
from luyen.runtime.worker import TrainWorker, WorkerGroup

_WAIT_S = 0.05
"""Seconds to wait for a confirmation at a time."""
_POLL_S = 0.005
"""Seconds between two polls for confirmations, while engines generate."""
_ACTOR = "actor/"


class WeightReceiver(Protocol):
    """The engines that receive weights."""

    def begin_publication(
        self,
        version: int,
        *,
        keep: Collection[int] = (),
        holder: Callable[[], None] | None = None,
    ) -> None:
        """Start a publication: it replaces all weights of the engines but the versions to keep.

        `holder` raises if the process that stores the parts is lost; it is called while engines
        lack them.
        """
        ...

    def send_all(
        self,
        parts: Sequence[Any],
        expected: Mapping[str, str],
        *,
        mapped: MappedWeights | None = None,
        gather_bytes: Callable[[], Sequence[Any]] | None = None,
    ) -> None:
        """Send the weights to every engine, with the digests that it must confirm.

        Engines that can read `mapped` do so, until `withdraw`; the rest get all parts, for which
        `gather_bytes` is called if there are none. An engine generates with the weights only after
        it has confirmed them; a UserError, here or in `receive`, if they differ.
        """
        ...

    def withdraw(self) -> None:
        """Return when no engine reads the workers' memory; none begins to after that."""
        ...

    def receive(self, wait_s: float) -> None:
        """Handle confirmations that have arrived, after waiting at most `wait_s` for the first."""
        ...

    @property
    def is_published(self) -> bool:
        """Whether all engines have confirmed the newest weights."""
        ...

    @property
    def confirmed_at(self) -> float:
        """When an engine last confirmed the newest weights, by the monotonic clock."""
        ...


@final
class PendingSync:
    """A publication in progress: workers gather the weights, then engines load them."""

    def __init__(self, weight_sync: "WeightSync", version: int, gathering: Gathering) -> None:
        """`gathering` waits for the workers."""
        self.version = version
        self.gathering = gathering
        self._weight_sync = weight_sync
        self._is_done = False

    def wait(self) -> None:
        """Return when every ready engine has confirmed the weights."""
        if not self._is_done:
            self._weight_sync.complete(self)
            self._is_done = True


@final
class WeightSync:
    """Publishes the workers' weights to the engines, and knows which version those have."""

    def __init__(
        self,
        workers: WorkerGroup[TrainWorker],
        receiver: WeightReceiver,
        watch: RoleMonitor | None = None,
    ) -> None:
        """`watch` records every complete publication."""
        self._workers = workers
        self._receiver = receiver
        self._watch = watch
        self._gathering: Gathering | None = None
        self._pending: PendingSync | None = None
        self._is_mapped = False
        """Whether engines may read the workers' memory."""
        self.newest: int | None = None
        """Version of the newest publication, if that is complete."""
        self.digests: Mapping[str, str] | None = None
        """Digests of every trained tensor, as the newest publication gathered them.

        None: no publication is complete, or the workers have taken a step since.
        """

    def forget(self) -> None:
        """Drop all state: the workers have loaded a checkpoint."""
        self.newest = self.digests = self._pending = self._gathering = None

    def release(self) -> None:
        """Return when no engine reads the workers' weights in place: they may change then."""
        if self._is_mapped:
            self._receiver.withdraw()
        self._is_mapped = False

    def change(self, gathering: Gathering | None = None) -> None:
        """Drop the digests: the workers take an optimizer step.

        `gathering` waits for the weights after it, where workers gather them without another call.
        """
        self.digests, self._gathering = None, gathering

    def begin(self, version: int) -> PendingSync:
        """Start a publication; workers gather their weights, unless they do so already.

        Requests submitted from now on are generated with these weights, once confirmed.
        """
        gathering, self._gathering = self._gathering or self._workers.gather(), None
        sync = PendingSync(self, version, gathering)
        self._receiver.begin_publication(version, holder=self._workers.raise_if_lost)
        self.newest, self._pending = None, sync
        return sync

    def complete(self, sync: PendingSync) -> None:
        """Send the gathered weights, and return when every ready engine has confirmed them."""
        assert sync is self._pending, "a newer publication has started since"
        gathered = sync.gathering()
        started = time.monotonic() - gathered.seconds
        again = None if gathered.mapped is None else self._gather_bytes
        self._is_mapped |= gathered.mapped is not None
        self._receiver.send_all(
            gathered.parts, _of_policy(gathered), mapped=gathered.mapped, gather_bytes=again
        )
        while not self._receiver.is_published:
            self._receiver.receive(_WAIT_S)
        self._finish(sync.version, gathered, started)

    def _gather_bytes(self) -> Sequence[Any]:
        """The same weights as bytes, for an engine that came later and cannot read in place."""
        return self._workers.gather("bytes")().parts

    async def publish_extra(self, version: int, keep: Collection[int]) -> None:
        """Publish the workers' weights in addition to the kept versions, while engines generate.

        They are bytes: a replica that is lost needs every kept version again, and the workers have
        only the newest.
        """
        started = time.monotonic()
        gathered = await asyncio.to_thread(self._workers.gather("bytes"))
        self._receiver.begin_publication(version, keep=keep, holder=self._workers.raise_if_lost)
        self._receiver.send_all(gathered.parts, _of_policy(gathered))
        while not self._receiver.is_published:
            self._receiver.receive(0.0)
            await asyncio.sleep(_POLL_S)
        self._finish(version, gathered, started)

    def demand(self, version: int) -> None:
        """Fail unless this is the version that was published last."""
        found = self._pending.version if self._pending is not None else self.newest
        assert found is not None, "no weights were published"
        assert found == version, f"version {found} was published, not {version}"

    def _finish(self, version: int, gathered: GatheredWeights, started: float) -> None:
        self.newest, self._pending, self.digests = version, None, gathered.digests
        if self._watch is not None:
            confirmed_at = self._receiver.confirmed_at
            self._watch.published(
                version=version,
                size=gathered.bytes,
                parameters=len(_of_policy(gathered)),
                way=_way(gathered),
                seconds=confirmed_at - started,
                ago=time.monotonic() - confirmed_at,
            )


def _way(gathered: GatheredWeights) -> str:
    """How the weights reached the engines."""
    if gathered.mapped is None:
        return "host"
    return "gpu and host" if gathered.parts else "gpu"


def _of_policy(gathered: GatheredWeights) -> dict[str, str]:
    """Digests of the policy's parameters, which engines must confirm."""
    return {
        name.removeprefix(_ACTOR): digest
        for name, digest in gathered.digests.items()
        if name.startswith(_ACTOR)
    }
