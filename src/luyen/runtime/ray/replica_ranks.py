"""A replica of several ranks on Ray: one actor each, started, lost and ended together.

The first rank is the replica that the controller calls; its other ranks follow. When one of them is
lost, the rest of the replica is ended, and it is started again as any other replica.
"""

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, final

import ray
from ray.exceptions import RayTaskError

from luyen.base.errors import UserError
from luyen.rollout.protocol import RolloutEngine
from luyen.runtime.monitoring import CallResult, RoleMonitor
from luyen.runtime.ray.cluster import meeting_place
from luyen.runtime.ray.health import (
    PROCESS_GONE,
    exit_with_parent,
    failure_reason,
    is_lost_connection,
)
from luyen.runtime.ray.messages import ProcessDied, RemoteError, ReplyCallback
from luyen.runtime.ray.replica import ReplicaProcess

MakeSplit: TypeAlias = Callable[
    [int, int, int, str, Callable[[BaseException], object]], RolloutEngine | None
]
"""`(replica, rank, number of ranks, rendezvous address, hears of errors) -> engine`.

It returns an engine on the first rank; on other ranks it follows that one, and returns at its end.
"""
_GRACE_S = 10.0
"""Seconds in which the controller ends the rest of a replica whose rank it has lost."""


def end_if_lost(fault: BaseException) -> None:
    """End this process if another rank is lost: the controller then starts the replica again."""
    if is_lost_connection(str(fault)):
        _wait_for_end()


def _wait_for_end() -> NoReturn:
    time.sleep(_GRACE_S)  # the controller knows which rank it was, and ends this one too
    os._exit(1)


@final
class LeaderProcess:
    """The Ray actor of the first rank of a replica."""

    def __init__(
        self, make: MakeSplit, index: int, ranks: int, *, folder: str, node: Callable[[], str]
    ) -> None:
        self._address, self._store = meeting_place(ray.util.get_node_ip_address())

        def make_leader(index: int) -> RolloutEngine:
            engine = make(index, 0, ranks, self._address, end_if_lost)
            assert engine is not None, "the first rank has an engine"
            return engine

        self._process = ReplicaProcess(make_leader, index, folder=folder, node=node)

    async def address(self) -> str:
        """Where the ranks of the replica meet."""
        return self._address

    async def carry_out(self, is_heard: bool, method: str, *arguments: Any) -> CallResult:
        """Call a method of the replica."""
        return await self._process.carry_out(is_heard, method, *arguments)


@final
class FollowerProcess:
    """The Ray actor of another rank of a replica."""

    def __init__(self, make: MakeSplit, index: int, *, folder: str) -> None:
        exit_with_parent()
        if Path(folder).is_dir():
            os.chdir(folder)
        self._make = make
        self._index = index

    def follow(self, rank: int, ranks: int, address: str) -> None:
        """Do what the first rank does, until it ends."""
        self._make(self._index, rank, ranks, address, end_if_lost)


@final
class SplitReplicaHandle:
    """Handle of a replica of several ranks."""

    def __init__(
        self,
        make: Any,
        index: int,
        places: Sequence[Mapping[str, Any]],
        watch: RoleMonitor,
        *,
        node: Callable[[], str],
        open_handle: Callable[[Any, int, RoleMonitor], Any],
    ) -> None:
        """Start an actor in each place; `open_handle` makes the handle of the first one."""
        remote: Any = ray.remote
        first, *rest = places
        common = {"max_restarts": 0}
        leader: Any = remote(LeaderProcess).options(max_concurrency=1000, **common, **first)
        follower: Any = remote(FollowerProcess)
        folder = os.getcwd()
        self._is_over = False
        self._cause: BaseException | None = None
        """Why a rank ended before the rest."""
        self._actors = [leader.remote(make, index, len(places), folder=folder, node=node)]
        self._leader = open_handle(self._actors[0], index, watch)
        address = self._actors[0].address.remote()
        for rank, place in enumerate(rest, 1):
            actor = follower.options(**common, **place).remote(make, index, folder=folder)
            self._actors.append(actor)
            done = actor.follow.remote(rank, len(places), address)
            done.future().add_done_callback(partial(self._on_end, rank))

    def call(self, method: str, *arguments: Any, reply: ReplyCallback | None = None) -> None:
        """Call a method of the replica without waiting; `ProcessDied` if a rank is gone."""
        named = None if reply is None else partial(self._named, reply)
        self._leader.call(method, *arguments, reply=named)

    def kill(self) -> None:
        """Kill the processes of all ranks."""
        self._is_over = True
        for actor in self._actors:
            ray.kill(actor, no_restart=True)

    def _on_end(self, rank: int, future: Future[Any]) -> None:
        """A rank does not follow any more: so ends the replica."""
        error = future.exception()
        if error is None or self._is_over:
            return
        self._cause = _cause(rank, error)
        # This is a thread of Ray, which a call of Ray would wait for.
        threading.Thread(target=self.kill, name="end of a replica", daemon=True).start()

    def _named(self, reply: ReplyCallback, value: Any, error: BaseException | None) -> None:
        """The reply, with the rank whose loss is behind that of the first one."""
        is_lost = isinstance(error, ProcessDied) and self._cause is not None
        reply(value, self._cause if is_lost else error)


def _cause(rank: int, error: BaseException) -> BaseException | None:
    """What to report of a rank that ended; None: the loss of another one is behind it."""
    if isinstance(error, PROCESS_GONE):
        return ProcessDied(f"rank {rank} of it is gone: {failure_reason(error)}")
    if is_lost_connection(str(error)):
        return None
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, UserError) else RemoteError(f"rank {rank}", str(error))
