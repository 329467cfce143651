"""Ranks that train together, as Ray actors: called all at once, and lost all at once.

A rank that dies leaves the others waiting in a collective for ever. So the first error of any of
them ends the group, and that error is what the caller hears.
"""

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from luyen.base.errors import UserError
from luyen.models.digest import describe
from luyen.runtime.rank_roles import RankRoles
from luyen.runtime.ray.weights import pack, size_of
from luyen.runtime.ray.wire import RemoteError

MakeRank: TypeAlias = Callable[[int, int, str], RankRoles]
"""`(rank, ranks, address where they meet) -> what it holds`."""
_LOOK_S = 1.0
_FIELD = "trainer.n_gpus_per_node"


@final
class RankProcess:
    """The process of one rank."""

    def __init__(self, make: MakeRank, rank: int, ranks: int, *, folder: str) -> None:
        os.chdir(folder)
        self._make = make
        self._rank = rank
        self._ranks = ranks
        self._roles: RankRoles | None = None

    def address(self) -> str:
        """Where the ranks can meet, if this is the first of them."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as free:
            free.bind((host, 0))
            return f"tcp://{host}:{free.getsockname()[1]}"

    def join(self, address: str) -> int:
        """Meet the others and load the models; the process id."""
        self._roles = self._make(self._rank, self._ranks, address)
        return os.getpid()

    def carry_out(self, method: str, arguments: Sequence[Any], more: Mapping[str, Any]) -> Any:
        """Call a method of the roles."""
        assert self._roles is not None, "the rank has not joined"
        return getattr(self._roles, method)(*arguments, **more)

    def publish(self, bucket_bytes: int) -> tuple[list[Any], dict[str, str], int]:
        """The policy's weights in the object store, with digests and bytes; from the first rank."""
        assert self._roles is not None, "the rank has not joined"
        parts: list[Any] = []
        digests: dict[str, str] = {}
        size = 0
        for bucket in self._roles.weights(bucket_bytes=bucket_bytes):
            parts.append(ray.put(pack(bucket)))
            digests |= describe(bucket)
            size += size_of(bucket.values())
        return parts, digests, size


@final
class RankGroup:
    """All ranks. After the first error nothing can be asked of them any more."""

    def __init__(self, make: MakeRank, *, places: Sequence[Mapping[str, Any]]) -> None:
        """One rank for each place (options of an actor); returns when all have met and loaded."""
        self.count = len(places)
        shared = ray.put(make)
        kind: Any = ray.remote(RankProcess)
        self._actors = [
            kind.options(max_restarts=0, **options).remote(
                shared, rank, self.count, folder=os.getcwd()
            )
            for rank, options in enumerate(places)
        ]
        (address,) = self._gathered([self._actors[0].address.remote()])
        self.pids: list[int] = self._gathered([a.join.remote(address) for a in self._actors])

    def each(
        self, method: str, arguments: Sequence[Sequence[Any]], more: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call a method on every rank with its own arguments; what each returned."""
        given = dict(more or {})
        called = [
            actor.carry_out.remote(method, tuple(own), given)
            for actor, own in zip(self._actors, arguments, strict=True)
        ]
        return self._gathered(called)

    def all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on every rank with the same arguments; what each returned."""
        return self.each(method, [arguments] * self.count)

    def publish(self, bucket_bytes: int) -> tuple[list[Any], dict[str, str], int]:
        """The policy's weights in the object store: references, digests, bytes."""
        return self._gathered([a.publish.remote(bucket_bytes) for a in self._actors])[0]

    def stop(self) -> None:
        """End every rank. Stopping twice is allowed."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []

    def _gathered(self, called: Sequence[Any]) -> list[Any]:
        """All results in order; the first error ends the group and is raised."""
        left = list(called)
        while left:
            done, left = ray.wait(left, num_returns=1, timeout=_LOOK_S)
            for one in done:
                try:
                    ray.get(one)
                except RayError as error:
                    rank = list(called).index(one)
                    self.stop()
                    raise _meaning(error, rank) from error
        return ray.get(list(called))


def _meaning(error: RayError, rank: int) -> BaseException:
    """What an error of Ray stands for, to the one who runs."""
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, UserError) else RemoteError(f"rank {rank}", str(error))
    if isinstance(error, RayActorError):
        first = str(error).strip().splitlines()[0]
        why = f"rank {rank} is gone: {first}"
        fix = (
            "look at the memory and the logs of its node; the same command goes on from the newest "
            "checkpoint and the journal"
        )
        return UserError(_FIELD, rank, why, fix)
    return error
