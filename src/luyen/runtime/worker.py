"""Workers: the models that learn and score, whole in one process, or one rank's shards of them.

With several ranks every method runs collectives: it must be called on all of them at the same
time, each with its own shard of the batch. `WorkerGroup` does so.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, TypeAlias, TypeVar, final

import torch
from torch import Tensor

from luyen.algorithms.objective import Objective
from luyen.base.files import writing
from luyen.checkpoint.file_writers import FileWriter
from luyen.checkpoint.tensors import not_finite, save_state
from luyen.checkpoint.writer import CheckpointWriter, RankWriter
from luyen.engine.actor import ActorEngine
from luyen.engine.batch import BatchShard
from luyen.engine.logprobs import FrozenPolicy
from luyen.engine.optim import MASTERS, first_moments
from luyen.engine.sharded_state import shard_sums
from luyen.engine.step import ShardUpdateResult
from luyen.models.weights import trained_parameters
from luyen.runtime.gpu_memory import can_map
from luyen.runtime.monitoring import ProcessTrace, TraceSpec
from luyen.runtime.training import Learner, PolicyLearner, ValueLearner
from luyen.runtime.weights import Gathering, WeightForm


def split_learned_state(state: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """First moments, and weights with masters, out of a checkpoint's state.

    A first moment holds the gradient of the step, which itself is cleared as soon as it is
    applied. The second moment holds the same once more, and would cost as much again.
    """
    moments: dict[str, Tensor] = {}
    weights: dict[str, Tensor] = {}
    for role, part in state.items():
        if MASTERS not in part:
            weights |= {f"{role}/{name}": tensor for name, tensor in part.items()}
            continue
        for optimizer, own in part.items():
            if optimizer != MASTERS:
                found = first_moments(optimizer, own["state"])
                moments |= {f"{role}/{name}": tensor for name, tensor in found.items()}
        weights |= {f"{role}/masters/{i}": t for i, t in enumerate(part[MASTERS])}
    return moments, weights


class ModelWorker(ABC):
    """What the processes of every stage do: checkpoints, digests and traces of what learns."""

    rank: int
    """Number of the process among its ranks."""

    def __init__(self, *, rank: int = 0) -> None:
        self.rank = rank
        self._writer = RankWriter()
        self._trace = ProcessTrace()

    @property
    @abstractmethod
    def role(self) -> str:
        """The role that this process is named after."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that batches must be on, where the caller is in this process."""

    @abstractmethod
    def _learners(self) -> Iterator[Learner]:
        """Every role here that learns."""

    def start_trace(self, trace: TraceSpec) -> None:
        """Start a trace of this rank."""
        self._trace.start(trace.of(f"{self.role}_{self.rank}"))

    def stop_trace(self) -> None:
        """End the trace and write its files."""
        self._trace.stop()

    @torch.no_grad()
    def weight_sums(self) -> dict[str, tuple[str, int]]:
        """This rank's parts of the digests of all trained weights."""
        sums: dict[str, tuple[str, int]] = {}
        for learner in self._learners():
            sums |= learner.weight_sums(is_first=self.rank == 0)
        return sums

    @torch.no_grad()
    def moment_sums(self) -> dict[str, tuple[str, int]]:
        """This rank's parts of the digests of first moments."""
        return shard_sums(split_learned_state(self.state())[0], is_first=self.rank == 0)

    def state(self) -> dict[str, Any]:
        """Weights and optimizer state of every trained role: the parts of a checkpoint by name."""
        state: dict[str, Any] = {}
        for learner in self._learners():
            state |= learner.state()
        return state

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a copy of `state` in place, where no model is sharded."""
        for learner in self._learners():
            learner.restore(state)

    def not_finite(self) -> list[str]:
        """Names of the tensors whose shard here holds NaN or infinity."""
        return not_finite(self.state())

    def write(self, folder: Path) -> None:
        """Write this rank's shards of weights and optimizer state into a folder."""
        with writing(folder, field="checkpoint"):
            for name, part in self.state().items():
                save_state(folder, name, part)

    def begin_write(self, folder: Path) -> None:
        """Copy this rank's shards; a thread writes them into the folder while training goes on."""

        def fill(writes: FileWriter) -> None:
            for name, part in self.state().items():
                save_state(folder, name, part, writes=writes)

        self._writer.begin(folder, fill)

    def is_written(self) -> bool:
        """Whether every started write of this rank is complete; raises the error of a write."""
        return self._writer.is_done()

    def load(self, folder: Path) -> None:
        """Load a checkpoint; it may have been saved by any number of ranks."""
        for learner in self._learners():
            learner.load(folder)


@final
class TrainWorker(ModelWorker):
    """Actor, reference, critic and teacher of one process, or those of them that are here."""

    def __init__(
        self,
        *,
        actor: PolicyLearner | None,
        reference: FrozenPolicy | None,
        critic: ValueLearner | None,
        teacher: FrozenPolicy | None = None,
        rank: int = 0,
    ) -> None:
        """`reference` None with a LoRA actor means the actor with its adapter off.

        `actor` None: this is a process of a pool that another role has for itself.
        """
        super().__init__(rank=rank)
        self._actor = actor
        self.reference = reference
        self.critic = critic
        self.teacher = teacher

    @property
    def actor(self) -> PolicyLearner:
        """The policy that learns."""
        assert self._actor is not None, "the actor is in another pool"
        return self._actor

    @property
    def role(self) -> str:
        """The role that this process is named after."""
        if self._actor is not None:
            return "actor"
        return "critic" if self.critic is not None else "reference"

    @property
    def device(self) -> torch.device:
        """That of the policy's weights."""
        return self.actor.policy.device

    def actor_scores(self, shard: BatchShard, *, sum_pi_squared: bool = False) -> dict[str, Tensor]:
        """Log-probabilities under the weights that the update starts from."""
        return self.actor.score_shard(shard, sum_pi_squared=sum_pi_squared)

    def reference_scores(self, shard: BatchShard) -> dict[str, Tensor]:
        """Log-probabilities under the reference policy."""
        if self.reference is not None:
            return self.reference.score_shard(shard)
        return self.actor.base_scores(shard)

    def teacher_scores(self, shard: BatchShard) -> dict[str, Tensor]:
        """Log-probabilities under the teacher."""
        assert self.teacher is not None, "the run has no teacher"
        return self.teacher.score_shard(shard)

    def critic_scores(self, shard: BatchShard) -> dict[str, Tensor]:
        """The critic's value before each token."""
        assert self.critic is not None, "the run has no critic"
        return self.critic.score_shard(shard)

    def expert_counts(self, shard: BatchShard) -> Tensor:
        """How often the policy chooses each of its experts."""
        return self.actor.expert_counts(shard)

    def update_actor(
        self,
        shard: BatchShard,
        *,
        objective: Objective,
        lr: float,
        statistics: Mapping[str, Tensor],
    ) -> ShardUpdateResult:
        """This rank's part of an optimizer step of the policy."""
        return self.actor.update_shard(shard, objective, lr=lr, statistics=statistics)

    def update_critic(self, shard: BatchShard, *, lr: float) -> ShardUpdateResult:
        """This rank's part of an optimizer step of the critic."""
        assert self.critic is not None, "the run has no critic"
        return self.critic.update_shard(shard, lr=lr)

    def weights(self) -> Iterator[dict[str, Tensor]]:
        """Full parameters of the policy in buckets, on the first rank; other ranks yield nothing.

        Those of a model that is not sharded are not copied: the next update changes them.
        """
        return self.actor.weights()

    def weights_in_place(self) -> dict[str, Tensor] | None:
        """The same where they are, if another process on this GPU can read them there."""
        if not isinstance(self.actor, ActorEngine):
            return None  # a plugin's may be made for `weights` alone
        own = trained_parameters(self.actor.policy)
        return own if can_map(own) else None

    def _learners(self) -> Iterator[Learner]:
        """Every role here that learns."""
        if self._actor is not None:
            yield self._actor
        if self.critic is not None:
            yield self.critic


# Typed calls to the workers of a run. A call names a method of their class by the function itself,
# so that its arguments and its result are checked where it is made. How it gets there is
# the transport: a plain call, a call whose messages are pickled (`luyen.runtime.in_process`), or a
# Ray actor (`luyen.runtime.ray.ranks`).

W = TypeVar("W", bound=ModelWorker)
P = ParamSpec("P")
R = TypeVar("R")
Part = TypeVar("Part")
Results: TypeAlias = Callable[[], list[R]]
"""Waits for the workers; their results by rank."""


class WorkerGroup(ABC, Generic[W]):
    """The workers of a run, called together. A worker runs its calls one after the other."""

    count: int
    """Workers."""
    ranks_per_shard: int = 1
    """Workers that compute each shard of a batch together (sequence parallelism)."""

    @property
    def shards(self) -> int:
        """Shards that a batch is split into."""
        return self.count // self.ranks_per_shard

    def all(
        self,
        method: Callable[Concatenate[W, P], R],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> list[R]:
        """Call a method of every worker with the same arguments; the results by rank."""
        return self.begin_all(method, *arguments, **named)()

    def each(
        self,
        method: Callable[Concatenate[W, Part, P], R],
        parts: Sequence[Part],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> list[R]:
        """Call a method of every worker with its shard first; the results by shard."""
        return self.begin_each(method, parts, *arguments, **named)()

    def begin_all(
        self,
        method: Callable[Concatenate[W, P], R],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> Results[R]:
        """Start `all`."""
        return self._begin(method, [arguments] * self.count, named)

    def begin_each(
        self,
        method: Callable[Concatenate[W, Part, P], R],
        parts: Sequence[Part],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> Results[R]:
        """Start `each`."""
        done = self._begin(method, self._by_worker(parts, arguments), named)
        return lambda: done()[:: self.ranks_per_shard]

    def begin_each_and_gather(
        self,
        method: Callable[Concatenate[W, Part, P], R],
        parts: Sequence[Part],
        *arguments: P.args,
        **named: P.kwargs,
    ) -> tuple[Results[R], Gathering]:
        """`begin_each` and `gather` as one call: workers do not wait for the caller in between."""
        done, gathering = self._begin_and_gather(method, self._by_worker(parts, arguments), named)
        return lambda: done()[:: self.ranks_per_shard], gathering

    def _by_worker(self, parts: Sequence[Any], arguments: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Arguments of every worker; consecutive ones share a part."""
        return [(part, *arguments) for part in parts for _ in range(self.ranks_per_shard)]

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device that batches must be on."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether the workers were stopped."""

    @abstractmethod
    def gather(self, form: WeightForm | None = None) -> Gathering:
        """Start to gather and digest the policy's weights, after all earlier calls.

        None: in the form that the engines need now.
        """

    @abstractmethod
    def raise_if_lost(self) -> None:
        """Raise the error if a worker is lost; for callers that wait for gathered weights."""

    @abstractmethod
    def save(
        self,
        writer: CheckpointWriter,
        step: int,
        *,
        parts: Mapping[str, Mapping[str, Any]],
        facts: Mapping[str, Any],
        further: "Sequence[WorkerGroup[Any]]" = (),
    ) -> None:
        """Write a checkpoint of the workers' state, where it is, and of further `parts` by name.

        `further` are groups of other roles that learn; their state is part of the checkpoint.
        """

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
