"""Replicas as Ray actors."""

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, final

import ray
from ray.exceptions import NodeDiedError, RayActorError, RayTaskError, WorkerCrashedError

from luyen.rollout.protocol import RolloutEngine
from luyen.runtime.ray.crew import Patience
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.replica import Replica
from luyen.runtime.ray.wire import Died, RemoteError, Reply

_ONE_CORE: Mapping[str, Any] = {"num_cpus": 1}
_PATIENCE = Patience()


def start_engines(
    make: Callable[[int], RolloutEngine],
    *,
    replicas: int,
    places: Sequence[Mapping[str, Any]] | None = None,
    patience: Patience = _PATIENCE,
) -> RayEngines:
    """Engines in processes of their own; returns when all are ready.

    `make` is pickled and called in each process with its index; it imports the plugins there.
    `places` are the options of each actor (`luyen.runtime.ray.placement.Placed.options`), which one
    that is begun again keeps; None: a core each, anywhere.
    """
    options = places or [_ONE_CORE] * replicas
    assert len(options) == replicas, f"{len(options)} places for {replicas} replicas"
    # Pickled once, not for every replica and every restart.
    shared = ray.put(make)

    def start(index: int) -> RayLink:
        return RayLink(_begin(shared, index, options[index]))

    return RayEngines(start, replicas=replicas, patience=patience)


def _begin(make: Any, index: int, options: Mapping[str, Any]) -> Any:
    actor: Any = ray.remote(Replica).options(max_restarts=0, max_concurrency=1000, **options)
    return actor.remote(make, index, folder=os.getcwd(), node=node_id)


def node_id() -> str:
    """The node that this process runs on."""
    return ray.get_runtime_context().get_node_id()


@final
class RayLink:
    """The way to a replica that is an actor."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def call(self, method: str, *arguments: Any, reply: Reply | None = None) -> None:
        """Call a method of the replica and return at once; a lost replica replies with `Died`."""
        found = getattr(self._actor, method).remote(*arguments)
        if reply is not None:
            found.future().add_done_callback(lambda future: _pass_on(future, reply))

    def kill(self) -> None:
        """End the replica, whatever it is doing."""
        ray.kill(self._actor, no_restart=True)


def _pass_on(future: Future[Any], reply: Reply) -> None:
    error = future.exception()
    reply(None if error is not None else future.result(), error and _meaning(error))


def _meaning(error: BaseException) -> BaseException:
    """What an error of Ray stands for."""
    if isinstance(error, RayActorError | NodeDiedError | WorkerCrashedError):
        return Died(str(error))
    if isinstance(error, RayTaskError):
        cause = error.cause
        return cause if isinstance(cause, Exception) else RemoteError("a replica", str(error))
    return error
