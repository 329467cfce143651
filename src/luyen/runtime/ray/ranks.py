"""The ranks of a training job as Ray actors: called together, and ended together.

When a rank dies, the remaining ranks would wait in a collective for ever. So the first error of any
rank ends the group and is raised; if that error only reports a lost connection, the error of the
rank that was lost is raised instead.
"""

import os
import pickle
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias, final

import ray
import torch
from ray.exceptions import RayError
from ray.util import register_serializer
from torch import Tensor

from luyen.base.heartbeat import HEART
from luyen.checkpoint.tensors import save_state
from luyen.checkpoint.writer import CheckpointWriter, WritersGone
from luyen.config.schema.trainer import TimeoutsConfig
from luyen.engine.sharded_state import ShardSums, merge_sums
from luyen.runtime.gpu_memory import (
    NOT_SHARED,
    MappedWeights,
    MemoryProbe,
    cuda_memory,
    describe,
    make_probe,
)
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
    WeightForm,
    pack,
    tensor_from_bytes,
    tensor_to_bytes,
    total_bytes,
)
from luyen.runtime.worker import ModelWorker, R, Results, W, WorkerGroup
from luyen.telemetry.spans import waiting_for
from luyen.telemetry.worker_spans import WORK

# Tensors in messages are sent as plain bytes: PyTorch pickles each one as a file with its storage,
# which takes 0.2 ms at either end. Received tensors are copies: the object store is read-only.


def send_tensors_as_arrays() -> None:
    """Make Ray send the tensors of this process as plain bytes."""
    register_serializer(Tensor, serializer=pack_tensors, deserializer=unpack_tensors)


def pack_tensors(tensor: Tensor) -> TensorBytes | bytes:
    """A tensor for a message: plain bytes, or pickled by PyTorch if it is not a plain CPU tensor.

    Example:
        >>> unpack_tensors(pack_tensors(torch.tensor([1.5], dtype=torch.bfloat16)))
        tensor([1.5000], dtype=torch.bfloat16)
    """
    is_plain = tensor.device.type == "cpu" and tensor.layout == torch.strided
    if not is_plain or tensor.requires_grad or tensor.is_complex():
        return pickle.dumps(tensor)
    return tensor_to_bytes(tensor)


def unpack_tensors(message: TensorBytes | bytes) -> Tensor:
    """The tensor of a message, in its own memory."""
    if isinstance(message, bytes):
        return pickle.loads(message)
    dtype, shape, array = message
    return tensor_from_bytes((dtype, shape, array.copy()))


MakeRank: TypeAlias = Callable[[int, int, str], W]
"""`(rank, number of ranks, rendezvous address) -> worker`."""
_POLL_S = 1.0
_GRACE_S = 5.0
"""Seconds to wait for the cause of a lost connection."""
_Gathered: TypeAlias = tuple[list[Any], MappedWeights | None, int, float, ShardSums]


@final
class RankProcess:
    """The process of one rank."""

    def __init__(self, make: MakeRank[ModelWorker], rank: int, ranks: int, *, folder: str) -> None:
        exit_with_parent()
        os.chdir(folder)
        send_tensors_as_arrays()
        self._make = make
        self._rank = rank
        self._ranks = ranks
        self._worker: ModelWorker | None = None
        self._store: Any = None
        """The store of the process group, from before it is made."""
        self._is_broken = False
        """Whether a call has failed, or is running."""
        self._kept: Tensor | None = None
        """What a probe of this process's memory reads."""
        self._offered: Mapping[str, Tensor] = {}
        """What replicas may read here until the next step; kept, since a pass may move weights."""
        self._node = ray.get_runtime_context().get_node_id()
        WORK.device_bytes = device_bytes

    @ray.method(concurrency_group="life")
    def alive(self) -> int:
        """Heartbeats of this process so far; answered also during another call."""
        return HEART.count

    def address(self) -> str:
        """Rendezvous address, if this is the first rank."""
        found, self._store = meeting_place(ray.util.get_node_ip_address())
        return found

    def join(self, address: str) -> CallResult:
        """Join the process group and load the models; the process id."""
        return self._answer("join", self._join, address)

    def carry_out(
        self, method: str, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> CallResult:
        """Call a method of the worker."""
        assert self._worker is not None, "the rank has not joined"
        return self._answer(method, getattr(self._worker, method), *arguments, **named)

    def probe(self) -> MemoryProbe | str | None:
        """How replicas on this GPU find out that they can read it; a text: why none can.

        None: the weights are not read where they are, and no replica needs a probe.
        """
        worker: Any = self._worker
        weights = worker.weights_in_place()
        if weights is None:
            return None
        try:
            memory = cuda_memory()
            describe(weights, memory)
            found, self._kept = make_probe(memory, next(iter(weights.values())).device)
        except NOT_SHARED as error:
            return str(error)
        return found

    def gather(self, form: WeightForm = "bytes") -> CallResult:
        """Digest the policy's weights (all ranks), and offer them in this form (first rank)."""
        return self._answer("publish", self._gather, form)

    @ray.method(num_returns=2)
    def carry_out_and_gather(
        self, form: WeightForm, method: str, arguments: Sequence[Any], named: Mapping[str, Any]
    ) -> tuple[CallResult, CallResult]:
        """`carry_out`, then `gather`; both results are returned when both are done."""
        return self.carry_out(method, arguments, named), self.gather(form)

    def _answer(
        self, name: str, work: Callable[..., Any], *arguments: Any, **named: Any
    ) -> CallResult:
        """Run a method; its result with the report of this process."""
        if self._is_broken:
            # Other ranks may still be inside the collective that failed here.
            raise ConnectionError(FAILED_BEFORE)
        came, worked = time.time(), time.process_time()
        with WORK.span(name) as facts:
            self._is_broken = True
            value = work(*arguments, **named)
            self._is_broken = False
            facts["cpu_s"] = round(time.process_time() - worked, 6)
        return CallResult(value=value, report=WORK.report(node=self._node, came=came))

    def _join(self, address: str) -> int:
        self._worker = self._make(self._rank, self._ranks, address)
        return os.getpid()

    @torch.no_grad()
    def _gather(self, form: WeightForm) -> _Gathered:
        worker: Any = self._worker  # a `TrainWorker`: no other one has replicas to publish to
        start = time.monotonic()
        sums = worker.weight_sums()
        mapped = None if form == "bytes" else self._offer(worker)
        parts: list[Any] = []
        size = 0 if mapped is None else mapped.bytes
        for bucket in worker.weights() if mapped is None or form == "both" else ():
            parts.append(ray.put(pack(bucket)))
            size += 0 if mapped else total_bytes(bucket.values())
        return parts, mapped, size, time.monotonic() - start, sums

    def _offer(self, worker: Any) -> MappedWeights | None:
        """The policy's weights where they are; None: they cannot be read there."""
        self._offered = worker.weights_in_place() or {}
        try:
            return describe(self._offered, cuda_memory()) if self._offered else None
        except NOT_SHARED:
            return None


@final
class RankGroup(WorkerGroup[W]):
    """The workers of a run as ranks. After the first error every call raises that error."""

    def __init__(
        self,
        make: MakeRank[W],
        *,
        places: Sequence[Mapping[str, Any]],
        timeouts: TimeoutsConfig | None = None,
        role: str = "actor",
        watch: RoleMonitor | None = None,
        ranks_per_shard: int = 1,
    ) -> None:
        """Start one rank for each place (options of an actor); returns when all have loaded.

        `role` names the processes in spans, metrics and errors. `watch` receives their reports;
        None: the group has a monitor of its own.
        """
        self.count = len(places)
        self.ranks_per_shard = ranks_per_shard
        send_tensors_as_arrays()
        self._role = role
        self.form: Callable[[], WeightForm] = lambda: "bytes"
        """In which form replicas need the weights when a gathering begins."""
        self.watch = watch or RoleMonitor()
        """Collects the reports of the ranks; other processes of the run report to it too."""
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
        """The first error."""
        self._ending = threading.Lock()
        pings = [actor.alive.remote for actor in self._actors]
        name = "rank" if role == "actor" else f"{role} rank"
        self._health = HealthCheck(pings, timeouts or TimeoutsConfig(), name=name)
        (address,) = self._collect([self._actors[0].address.remote()])
        sent = time.time()
        joining = [a.join.remote(address) for a in self._actors]
        self.pids: list[int] = self._collect(joining, sent=sent)

    @property
    def device(self) -> torch.device:
        """Batches stay with the controller."""
        return torch.device("cpu")

    def probe(self) -> MemoryProbe | str | None:
        """How replicas find out that they can read the first rank's memory; a text: why not."""
        return self._collect([self._living()[0].probe.remote()])[0]

    def gather(self, form: WeightForm | None = None) -> Gathering:
        """Gather the policy's weights; None: in the form that replicas need now."""
        sent, wanted = time.time(), form or self.form()
        return self._gathering([a.gather.remote(wanted) for a in self._living()], sent)

    def save(
        self,
        writer: CheckpointWriter,
        step: int,
        *,
        parts: Mapping[str, Mapping[str, Any]],
        facts: Mapping[str, Any],
        further: Sequence[WorkerGroup[Any]] = (),
    ) -> None:
        """Write a checkpoint; every rank writes its shards into the folder, on a shared disk."""
        write = ModelWorker.begin_write if writer.is_async else ModelWorker.write
        groups: tuple[WorkerGroup[Any], ...] = (self, *further)

        def fill(folder: Path) -> None:
            for done in [group.begin_all(write, folder.absolute()) for group in groups]:
                done()
            for name, part in parts.items():
                save_state(folder, name, part)

        def is_written() -> bool:
            if any(group.is_over for group in groups):
                raise WritersGone
            return all(all(group.all(ModelWorker.is_written)) for group in groups)

        if writer.is_async:
            writer.save_remote(step, fill, is_written, facts=facts)
        else:
            writer.save_now(step, fill, facts=facts)

    def _begin(
        self,
        method: Callable[..., R],
        arguments: Sequence[Sequence[Any]],
        named: Mapping[str, Any],
    ) -> Results[R]:
        sent = time.time()
        called = [
            actor.carry_out.remote(method.__name__, tuple(own), named)
            for actor, own in zip(self._living(), arguments, strict=True)
        ]
        return lambda: self._collect(called, sent=sent)

    def _begin_and_gather(
        self,
        method: Callable[..., R],
        arguments: Sequence[Sequence[Any]],
        named: Mapping[str, Any],
    ) -> tuple[Results[R], Gathering]:
        sent, form = time.time(), self.form()
        both = [
            actor.carry_out_and_gather.remote(form, method.__name__, tuple(own), named)
            for actor, own in zip(self._living(), arguments, strict=True)
        ]
        called = [first for first, _ in both]
        gathering = self._gathering([second for _, second in both], sent)
        return lambda: self._collect(called, sent=sent), gathering

    def _gathering(self, called: Sequence[Any], sent: float) -> Gathering:
        def gathered() -> GatheredWeights:
            found = self._collect(called, sent=sent)
            parts, mapped, size, seconds, _ = found[0]
            digests = merge_sums([sums for *_, sums in found])
            return GatheredWeights(
                parts=parts, bytes=size, seconds=seconds, digests=digests, mapped=mapped
            )

        return gathered

    @property
    def is_over(self) -> bool:
        """Whether the ranks were stopped."""
        return not self._actors

    def raise_if_lost(self) -> None:
        """Raise the error if a rank is lost or silent; for callers that wait for their objects."""
        self._living()
        fault = self._health.loss()
        if fault is not None:
            self._end(fault)

    def stop(self) -> None:
        """End every rank. Stopping twice is allowed."""
        for actor in self._actors:
            ray.kill(actor, no_restart=True)
        self._actors = []

    def _collect(self, called: Sequence[Any], *, sent: float | None = None) -> list[Any]:
        """All results in order; the first error stops the ranks and is raised."""
        left, back = list(called), dict[Any, float]()
        answers: dict[Any, Any] = {}
        while left:
            with waiting_for(self._role):
                done, left = ray.wait(left, num_returns=1, timeout=_POLL_S)
            back |= dict.fromkeys(done, time.time())
            errors = _opened(called, done, answers)
            fault = self._fault(called, errors, has_moved=bool(done))
            if fault is not None:
                self._end(fault)
        if sent is None:
            return [answers[one] for one in called]
        return [
            unwrap_result(answers[one], self.watch, self._role, rank, sent=sent, back=back[one])
            for rank, one in enumerate(called)
        ]

    def _living(self) -> list[Any]:
        """All actors; raises the first error, which any thread may have recorded."""
        actors = self._actors  # read before the error: another thread may stop them now
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
        """The error that ends these calls; None: they can still complete."""
        if errors:
            return self._cause(called, *errors[0])
        # A rank that died after its part of a collective blocks the remaining ranks too.
        return None if has_moved else self._health.loss()

    def _cause(self, called: Sequence[Any], rank: int, error: RayError) -> BaseException:
        """The error to raise; for a secondary error, its cause, if that arrives in `_GRACE_S`."""
        last = time.monotonic() + _GRACE_S
        while is_secondary_error(error) and self._error is None and time.monotonic() < last:
            done, _ = ray.wait(list(called), num_returns=len(called), timeout=0.2)
            errors = [*_opened(called, done, {}), *self._health.gone().items()]
            for primary in (one for one in errors if not is_secondary_error(one[1])):
                rank, error = primary
        return classify_failure(error, self._health.name_of(rank))


def _opened(
    called: Sequence[Any], done: Sequence[Any], answers: dict[Any, Any]
) -> list[tuple[int, RayError]]:
    """Ranks whose calls failed, with their errors; other results go into `answers`."""
    found: list[tuple[int, RayError]] = []
    for one in done:
        try:
            answers[one] = ray.get(one)
        except RayError as error:
            found.append((list(called).index(one), error))
    return found
