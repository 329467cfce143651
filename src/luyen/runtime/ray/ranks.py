"""Ranks that train together, as Ray actors: called all at once, and lost all at once.

A rank that dies leaves the others waiting in a collective for ever. So the first error of any of
them ends the group, and that error is what the caller hears; where the first to complain only lost
the connection to another, it is the reason of that other.
"""

import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, final

import ray
import torch
from ray.exceptions import RayError
from ray.util import register_serializer
from torch import Tensor

from luyen.base.heartbeat import HEART
from luyen.engine.sharded_state import ShardSums, merge_sums
from luyen.runtime.monitoring import CallResult, RoleMonitor, device_bytes, unwrap_result
from luyen.runtime.ray.cluster import meeting_place
from luyen.runtime.ray.health import (
    FAILED_BEFORE,
    HealthCheck,
    classify_failure,
    exit_with_parent,
    is_secondary_error,
)
from luyen.runtime.weights import (
    GatheredWeights,
    Gathering,
    TensorBytes,
    pack,
    tensor_from_bytes,
    tensor_to_bytes,
    total_bytes,
)
from luyen.telemetry.spans import waiting_for
from luyen.telemetry.worker_spans import WORK

if TYPE_CHECKING:
    from luyen.runtime.worker import RankWorker


# Tensors in messages as plain bytes: a record with twenty numbers is not twenty little files.
#
# PyTorch pickles a tensor as a file with its storage inside, which takes a fifth of a
# millisecond at either end. What arrives here has memory of its own: what lies in the object
# store is nobody's to write to.


def send_tensors_as_arrays() -> None:
    """From now on, tensors that this process sends with Ray are plain bytes."""
    register_serializer(Tensor, serializer=pack_tensors, deserializer=unpack_tensors)


def pack_tensors(tensor: Tensor) -> TensorBytes | bytes:
    """A tensor for a message: bytes, or what PyTorch makes of one that is more than that.

    Example:
        >>> unpack_tensors(pack_tensors(torch.tensor([1.5], dtype=torch.bfloat16)))
        tensor([1.5000], dtype=torch.bfloat16)
    """
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    if not is_plain or tensor.requires_grad or tensor.is_complex():
        return pickle.dumps(tensor)
    return tensor_to_bytes(tensor)


def unpack_tensors(message: TensorBytes | bytes) -> Tensor:
    """The tensor of a message, in memory of its own."""
    if isinstance(message, bytes):
        return pickle.loads(message)
    dtype, shape, array = message
    return tensor_from_bytes((dtype, shape, array.copy()))


MakeRank: TypeAlias = "Callable[[int, int, str], RankWorker]"
"""`(rank, ranks, address where they meet) -> what it holds`."""
_LOOK_S = 1.0
_GRACE_S = 5.0
"""How long the reason of a lost connection is waited for."""
START_S = 600.0
"""A rank whose process is not there after so many seconds is lost."""
SILENCE_S = 120.0
"""A process that cannot say for so many seconds that it lives is lost."""


@final
class RankProcess:
    """The process of one rank."""

    def __init__(self, make: MakeRank, rank: int, ranks: int, *, folder: str) -> None:
        exit_with_parent()
        os.chdir(folder)
        send_tensors_as_arrays()
        self._make = make
        self._rank = rank
        self._ranks = ranks
        self._roles: "RankWorker | None" = None
        self._is_broken = False
        """Whether a call failed, or is being carried out."""
        self._node = ray.get_runtime_context().get_node_id()
        WORK.device_bytes = device_bytes

    @ray.method(concurrency_group="life")
    def alive(self) -> int:
        """Beats of this process so far; it answers whatever else it is doing."""
        return HEART.count

    def address(self) -> str:
        """Where the ranks can meet, if this is the first of them."""
        return meeting_place(ray.util.get_node_ip_address())

    def join(self, address: str) -> CallResult:
        """Meet the others and load the models; the process id."""
        return self._answer("join", self._join, address)

    def carry_out(
        self, method: str, arguments: Sequence[Any], more: Mapping[str, Any]
    ) -> CallResult:
        """Call a method of the roles."""
        assert self._roles is not None, "the rank has not joined"
        return self._answer(method, getattr(self._roles, method), *arguments, **more)

    def publish(self) -> CallResult:
        """The policy's weights in the object store, from the first rank; digests from all."""
        return self._answer("publish", self._publish)

    @ray.method(num_returns=2)
    def carry_out_and_publish(
        self, method: str, arguments: Sequence[Any], more: Mapping[str, Any]
    ) -> tuple[CallResult, CallResult]:
        """`carry_out`, then `publish`; what each gives is told when both are done."""
        return self.carry_out(method, arguments, more), self.publish()

    def _answer(
        self, name: str, work: Callable[..., Any], *arguments: Any, **more: Any
    ) -> CallResult:
        """Do something, with what it took beside the result."""
        if self._is_broken:
            # Others may still wait inside of what failed here, and would take this for it.
            raise ConnectionError(FAILED_BEFORE)
        came, worked = time.time(), time.process_time()
        with WORK.span(name) as facts:
            self._is_broken = True
            value = work(*arguments, **more)
            self._is_broken = False
            facts["cpu_s"] = round(time.process_time() - worked, 6)
        return CallResult(value=value, report=WORK.report(node=self._node, came=came))

    def _join(self, address: str) -> int:
        self._roles = self._make(self._rank, self._ranks, address)
        return os.getpid()

    @torch.no_grad()
    def _publish(self) -> tuple[list[Any], int, float, ShardSums]:
        assert self._roles is not None, "the rank has not joined"
        start = time.monotonic()
        sums = self._roles.weight_sums()
        parts: list[Any] = []
        size = 0
        for bucket in self._roles.weights():
            parts.append(ray.put(pack(bucket)))
            size += total_bytes(bucket.values())
        return parts, size, time.monotonic() - start, sums


@final
class RankGroup:
    """All ranks. After the first error nothing can be asked of them any more."""

    def __init__(
        self,
        make: MakeRank,
        *,
        places: Sequence[Mapping[str, Any]],
        start_s: float = START_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        """One rank for each place (options of an actor); returns when all have met and loaded."""
        self.count = len(places)
        send_tensors_as_arrays()
        self.watch = RoleMonitor()
        """Hears what the ranks do; others of the run may tell it more."""
        shared = ray.put(make)
        remote: Any = ray.remote
        kind = remote(concurrency_groups={"life": 1})(RankProcess)
        self._actors = [
            kind.options(max_restarts=0, **options).remote(
                shared, rank, self.count, folder=os.getcwd()
            )
            for rank, options in enumerate(places)
        ]
        self._error: BaseException | None = None
        """What ended them first."""
        self._ending = threading.Lock()
        asks = [actor.alive.remote for actor in self._actors]
        self._pulse = HealthCheck(asks, start_s=start_s, silence_s=silence_s)
        (address,) = self._gathered([self._actors[0].address.remote()])
        sent = time.time()
        joining = [a.join.remote(address) for a in self._actors]
        self.pids: list[int] = self._gathered(joining, sent=sent)

    def begin(
        self, method: str, arguments: Sequence[Sequence[Any]], more: Mapping[str, Any] | None = None
    ) -> Callable[[], list[Any]]:
        """Call a method on every rank with its own arguments; ask the result what each returned.

        Ranks do one thing after the other, in the order in which they were called.
        """
        given, sent = dict(more or {}), time.time()
        called = [
            actor.carry_out.remote(method, tuple(own), given)
            for actor, own in zip(self._living(), arguments, strict=True)
        ]
        return lambda: self._gathered(called, sent=sent)

    def begin_and_publish(
        self, method: str, arguments: Sequence[Sequence[Any]], more: Mapping[str, Any]
    ) -> tuple[Callable[[], list[Any]], Gathering]:
        """`begin` and `begin_publish` in one call: ranks do not stop to tell of the first."""
        sent = time.time()
        both = [
            actor.carry_out_and_publish.remote(method, tuple(own), more)
            for actor, own in zip(self._living(), arguments, strict=True)
        ]
        called = [first for first, _ in both]
        publishing = self._publishing([second for _, second in both], sent)
        return lambda: self._gathered(called, sent=sent), publishing

    def each(
        self, method: str, arguments: Sequence[Sequence[Any]], more: Mapping[str, Any] | None = None
    ) -> list[Any]:
        """Call a method on every rank with its own arguments; what each returned."""
        return self.begin(method, arguments, more)()

    def all(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method on every rank with the same arguments; what each returned."""
        return self.each(method, [arguments] * self.count)

    def begin_all(self, method: str) -> Callable[[], list[Any]]:
        """Call a method on every rank; ask the result what each returned."""
        return self.begin(method, [()] * self.count)

    def begin_publish(self) -> Gathering:
        """Put the policy's weights into the object store; ask the result for what there is."""
        sent = time.time()
        return self._publishing([a.publish.remote() for a in self._living()], sent)

    def _publishing(self, called: Sequence[Any], sent: float) -> Gathering:
        def gathered() -> GatheredWeights:
            found = self._gathered(called, sent=sent)
            parts, size, seconds, _ = found[0]
            digests = merge_sums([sums for *_, sums in found])
            return GatheredWeights(parts=parts, bytes=size, seconds=seconds, digests=digests)

        return gathered

    @property
    def is_over(self) -> bool:
        """Whether nothing can be asked of them any more."""
        return not self._actors

    def look(self) -> None:
        """Somebody waits for what they have given: raise why nothing more can come of them."""
        self._living()
        fault = self._pulse.loss()
        if fault is not None:
            self._end(fault)

    def stop(self) -> None:
        """End every rank. Stopping twice is allowed."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []

    def _gathered(self, called: Sequence[Any], *, sent: float | None = None) -> list[Any]:
        """All results in order; the first error ends the group and is raised."""
        left, back = list(called), dict[Any, float]()
        answers: dict[Any, Any] = {}
        while left:
            with waiting_for("actor"):
                done, left = ray.wait(left, num_returns=1, timeout=_LOOK_S)
            back |= dict.fromkeys(done, time.time())
            errors = _opened(called, done, answers)
            fault = self._fault(called, errors, has_moved=bool(done))
            if fault is not None:
                self._end(fault)
        if sent is None:
            return [answers[one] for one in called]
        return [
            unwrap_result(answers[one], self.watch, "actor", rank, sent=sent, back=back[one])
            for rank, one in enumerate(called)
        ]

    def _living(self) -> list[Any]:
        """All of them; an error that ended them, whoever heard of it, is raised again."""
        actors = self._actors  # before the error is asked for: another thread may end them now
        if self._error is not None:
            raise self._error
        return actors

    def _end(self, fault: BaseException) -> NoReturn:
        with self._ending:
            self._error = error = self._error or fault
        self.stop()
        raise error

    def _fault(
        self, called: Sequence[Any], errors: Sequence[tuple[int, RayError]], *, has_moved: bool
    ) -> BaseException | None:
        """Why nothing more can come of these calls; None: it can."""
        if errors:
            return self._cause(called, *errors[0])
        # A rank that has done its part and died holds up the others, too.
        return None if has_moved else self._pulse.loss()

    def _cause(self, called: Sequence[Any], rank: int, error: RayError) -> BaseException:
        """What the first error stands for; of an echo, of what, which another thread may hear."""
        last = time.monotonic() + _GRACE_S
        while is_secondary_error(error) and self._error is None and time.monotonic() < last:
            done, _ = ray.wait(list(called), num_returns=len(called), timeout=0.2)
            others = [*_opened(called, done, {}), *self._pulse.gone().items()]
            for other in (one for one in others if not is_secondary_error(one[1])):
                rank, error = other
        return classify_failure(error, rank)


def _opened(
    called: Sequence[Any], done: Sequence[Any], answers: dict[Any, Any]
) -> list[tuple[int, RayError]]:
    """Ranks whose calls failed, with their errors; what others answered goes into `answers`."""
    found: list[tuple[int, RayError]] = []
    for one in done:
        try:
            answers[one] = ray.get(one)
        except RayError as error:
            found.append((list(called).index(one), error))
    return found
