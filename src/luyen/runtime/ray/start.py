"""Replicas as Ray actors."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, final

import ray
from ray.exceptions import RayTaskError

from luyen.rollout.protocol import RolloutEngine
from luyen.runtime.ray.answered import Answered, opened
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.losses import GONE, holds_lost, reason
from luyen.runtime.ray.patience import Patience
from luyen.runtime.ray.replica_process import ReplicaProcess
from luyen.runtime.ray.wire import Died, RanksLost, RemoteError, Reply
from luyen.runtime.watch import RoleWatch

_ONE_CORE: Mapping[str, Any] = {"num_cpus": 1}
_PATIENCE = Patience()


def start_engines(
    make: Callable[[int], RolloutEngine],
    *,
    replicas: int,
    places: Sequence[Mapping[str, Any]] | None = None,
    patience: Patience = _PATIENCE,
    watch: RoleWatch | None = None,
) -> RayEngines:
    """Engines in processes of their own; returns when all are ready.

    `make` is pickled and called in each process with its index; it imports the plugins there.
    `places` are the options of each actor (`luyen.runtime.ray.placement.Placed.options`), which one
    that is begun again keeps; None: a core each, anywhere. `watch` hears what they do.
    """
    options = places or [_ONE_CORE] * replicas
    assert len(options) == replicas, f"{len(options)} places for {replicas} replicas"
    # Pickled once, not for every replica and every restart.
    shared = ray.put(make)

    told = watch or RoleWatch()

    def start(index: int) -> RayLink:
        return RayLink(_begin(shared, index, options[index]), index, told)

    return RayEngines(start, replicas=replicas, patience=patience)


def _begin(make: Any, index: int, options: Mapping[str, Any]) -> Any:
    actor: Any = ray.remote(ReplicaProcess).options(max_restarts=0, max_concurrency=1000, **options)
    return actor.remote(make, index, folder=os.getcwd(), node=node_id)


def node_id() -> str:
    """The node that this process runs on."""
    return ray.get_runtime_context().get_node_id()


@final
class RayLink:
    """The way to a replica that is an actor."""

    def __init__(self, actor: Any, index: int, watch: RoleWatch) -> None:
        """What the replica tells of itself goes to `watch`."""
        self._actor = actor
        self._index = index
        self._watch = watch

    def call(self, method: str, *arguments: Any, reply: Reply | None = None) -> None:
        """Call a method of the replica and return at once; a lost replica replies with `Died`."""
        sent = time.time()
        found = self._actor.carry_out.remote(reply is not None, method, *arguments)
        if reply is not None:
            found.future().add_done_callback(lambda future: self._pass_on(future, reply, sent))

    def _pass_on(self, future: Future[Any], reply: Reply, sent: float) -> None:
        back, error = time.time(), future.exception()
        if error is not None:
            reply(None, _meaning(error))
            return
        answer: Answered = future.result()
        reply(opened(answer, self._watch, "rollout", self._index, sent=sent, back=back), None)

    def kill(self) -> None:
        """End the replica, whatever it is doing."""
        ray.kill(self._actor, no_restart=True)


def _meaning(error: BaseException) -> BaseException:
    """What an error of Ray stands for."""
    if isinstance(error, GONE):
        return Died(reason(error))
    if holds_lost(error):
        return RanksLost("the published weights are gone with the rank that held them")
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, Exception) else RemoteError("a replica", str(error))
    return error
