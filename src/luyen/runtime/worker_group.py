"""Typed calls to the workers of a run, and the workers of this process.

A call names a method of `luyen.runtime.worker.TrainWorker` by the function itself, so that its
arguments and its result are checked where it is made. How it gets there is the transport: a plain
call, a call whose messages are pickled (strict mode), or a Ray actor
(`luyen.runtime.ray.ranks.RankGroup`).
"""

import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Concatenate, ParamSpec, TypeAlias, TypeVar, final

import torch

from luyen.checkpoint.writer import CheckpointWriter
from luyen.engine.sharded_state import merge_sums
from luyen.models.trained_weights import trained_parameters
from luyen.runtime.weights import GatheredWeights, Gathering, total_bytes
from luyen.runtime.worker import TrainWorker

P = ParamSpec("P")
R = TypeVar("R")
Part = TypeVar("Part")
Results: TypeAlias = Callable[[], list[R]]
"""Waits for the workers; their results by rank."""

STRICT_VARIABLE = "LUYEN_STRICT"
"""Environment variable: at 1, the messages of a run in one process are pickled."""


class WorkerGroup(ABC):
    """The workers of a run, called together. A worker runs its calls one after the other."""

    count: int
    """Workers."""

    def all(
        self,
        method: Callable[Concatenate[TrainWorker, P], R],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> list[R]:
        """Call a method of every worker with the same arguments; the results by rank."""
        return self.begin_all(method, *arguments, **named)()

    def each(
        self,
        method: Callable[Concatenate[TrainWorker, Part, P], R],
        parts: Sequence[Part],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> list[R]:
        """Call a method of every worker with its own part first; the results by rank."""
        return self.begin_each(method, parts, *arguments, **named)()

    def begin_all(
        self,
        method: Callable[Concatenate[TrainWorker, P], R],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> Results[R]:
        """Start `all`."""
        return self._begin(method, [arguments] * self.count, named)

    def begin_each(
        self,
        method: Callable[Concatenate[TrainWorker, Part, P], R],
        parts: Sequence[Part],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> Results[R]:
        """Start `each`."""
        return self._begin(method, [(part, *arguments) for part in parts], named)

    def begin_each_and_gather(
        self,
        method: Callable[Concatenate[TrainWorker, Part, P], R],
        parts: Sequence[Part],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> tuple[Results[R], Gathering]:
        """`begin_each` and `gather` as one call: workers do not wait for the caller in between."""
        return self._begin_and_gather(method, [(part, *arguments) for part in parts], named)

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that batches must be on."""

    @abstractmethod
    def gather(self) -> Gathering:
        """Start to gather and digest the policy's weights, after all earlier calls."""

    @abstractmethod
    def raise_if_lost(self) -> None:
        """Raise the error if a worker is lost; for callers that wait for gathered weights."""

    @abstractmethod
    def save(
        self,
        writer: CheckpointWriter,
        step: int,
        *,
        loop: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint of the workers' state and the loop's, where the state is."""

    @abstractmethod
    def _begin(
        self,
        method: Callable[..., R],
        arguments: Sequence[Sequence[Any]],
        named: Mapping[str, Any],
    ) -> Results[R]:
        """Call a method of every worker, each with its own arguments."""

    @abstractmethod
    def _begin_and_gather(
        self,
        method: Callable[..., R],
        arguments: Sequence[Sequence[Any]],
        named: Mapping[str, Any],
    ) -> tuple[Results[R], Gathering]:
        """`_begin`, then `gather`."""


def pickle_roundtrip(value: R) -> R:
    """The value as another process would receive it; a TypeError if it cannot be pickled.

    Example:
        >>> given = {"logp": torch.ones(2)}
        >>> arrived = pickle_roundtrip(given)
        >>> arrived["logp"].tolist(), arrived["logp"] is given["logp"]
        ([1.0, 1.0], False)
    """
    return pickle.loads(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


@final
class LocalWorkers(WorkerGroup):
    """The one worker of a run in this process. A call is complete when it returns.

    In strict mode the messages of a call are pickled, so that caller and worker share no object.
    It finds batches that cannot be sent, and callers that rely on getting their own tensor back.
    Weights and checkpoints are no messages: they stay in this process.
    """

    count = 1

    def __init__(self, worker: TrainWorker, *, is_strict: bool = False) -> None:
        self.worker = worker
        self.is_strict = is_strict

    @property
    def device(self) -> torch.device:
        """The device of the policy."""
        return self.worker.actor.policy.device

    def gather(self) -> Gathering:
        """The policy's own parameters, with digests of every trained tensor."""
        start = time.monotonic()
        weights = trained_parameters(self.worker.actor.policy)
        digests = merge_sums([self.worker.weight_sums()])
        gathered = GatheredWeights(
            parts=[weights],
            bytes=total_bytes(weights.values()),
            seconds=time.monotonic() - start,
            digests=digests,
        )
        return lambda: gathered

    def raise_if_lost(self) -> None:
        """The worker is here."""

    def save(
        self,
        writer: CheckpointWriter,
        step: int,
        *,
        loop: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> None:
        """Write a checkpoint from this process."""
        writer.save(step, {**self.worker.state(), "loop": loop}, facts=facts)

    def _begin(
        self,
        method: Callable[..., R],
        arguments: Sequence[Sequence[Any]],
        named: Mapping[str, Any],
    ) -> Results[R]:
        (own,) = arguments
        if self.is_strict:
            own, named = pickle_roundtrip((own, named))
        value = method(self.worker, *own, **named)
        found = [pickle_roundtrip(value) if self.is_strict else value]
        return lambda: found

    def _begin_and_gather(
        self,
        method: Callable[..., R],
        arguments: Sequence[Sequence[Any]],
        named: Mapping[str, Any],
    ) -> tuple[Results[R], Gathering]:
        return self._begin(method, arguments, named), self.gather()
