"""The roles of a run on a cluster: ranks that train, replicas that generate, one controller."""

import queue
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from luyen.algorithms.aggregation import aggregation_weights
from luyen.algorithms.objective import Objective
from luyen.base.boundary import boundary
from luyen.checkpoint.tensors import save_state
from luyen.checkpoint.writer import CheckpointWriter, WritersGone
from luyen.engine.actor import merge_policy_updates, policy_inputs, prepare_update
from luyen.engine.batch import PackedBatch
from luyen.engine.batch_shards import MicroBatching, join_shards, split_batch
from luyen.engine.step import LOSS_WEIGHT, UpdateResult, merge_updates
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import Group, PromptRequest
from luyen.runtime.futures import (
    LazyRollouts,
    Publication,
    ReadyRollouts,
    RolloutFuture,
    RunningUpdate,
)
from luyen.runtime.generation import AsyncGeneration, Generation
from luyen.runtime.monitoring import TraceSpec
from luyen.runtime.ray.engines import RayEngines
from luyen.runtime.ray.messages import ReplicaState
from luyen.runtime.ray.ranks import RankGroup
from luyen.runtime.ray.weight_sync import RankWeightDigests, WeightSync
from luyen.runtime.weights import Gathering
from luyen.telemetry.journal import WorkJournal

# How the work of a step is cut for ranks that are elsewhere.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RoleMicroBatching:
    """Micro-batches of each kind of pass, and how tokens weigh in the value loss.

    Example:
        >>> whole = MicroBatching()
        >>> RoleMicroBatching(actor=whole, log_probs=whole, reference=whole).critic is None
        True
    """

    actor: MicroBatching
    """The policy's update."""
    log_probs: MicroBatching
    """Old log-probabilities."""
    reference: MicroBatching
    """Log-probabilities of the reference."""
    critic: MicroBatching | None = None
    """Values and the critic's update; None: there is no critic."""
    value_aggregation: str = "token-mean"
    """How the value losses of tokens become one number."""
    value_scale: float | None = None
    """Divisor of one of those ways."""


# Traces of every process of a cluster's run: ranks and replicas.


@final
class ClusterTraces:
    """Starts and stops traces in the processes of ranks and replicas.

    A replica that is lost meanwhile leaves no trace.
    """

    def __init__(
        self, ranks: RankGroup, engines: RayEngines, ahead: AsyncGeneration | None
    ) -> None:
        """With `ahead` only its thread may touch the engines."""
        self._ranks = ranks
        self._engines = engines
        self._ahead = ahead

    def start_trace(self, trace: TraceSpec) -> None:
        """Record what every rank and every replica computes from now on."""
        self._replicas("start_trace", trace)
        self._ranks.all("start_trace", trace)

    def stop_trace(self) -> None:
        """Write down what was recorded."""
        self._ranks.all("stop_trace")
        self._replicas("stop_trace")

    def _replicas(self, method: str, *arguments: TraceSpec) -> None:
        def call() -> object:
            return self._engines.replica_pool.ask_all(method, *arguments)

        if self._ahead is None:
            call()
        else:
            self._ahead.on_engine(call)


# The last spans of replicas: what they did since they were heard, before they are ended.

_FLUSH_S = 1.0
"""For all of them together: a run does not wait for spans."""


def flush_traces(members: Iterable[ReplicaState]) -> None:
    """Ask every replica that is ready who it is, for the report that comes with the answer."""
    said: queue.SimpleQueue[Any] = queue.SimpleQueue()
    asked = 0
    with boundary([]):
        for member in members:
            if member.is_ready and member.link is not None:
                member.link.call("facts", reply=lambda value, error: said.put((value, error)))
                asked += 1
    last = time.monotonic() + _FLUSH_S
    for _ in range(asked):
        try:
            said.get(timeout=max(0.0, last - time.monotonic()))
        except queue.Empty:
            return


@final
class RayRoles:
    """What the loop calls. Batches are whole and lie here; ranks get their shares of them."""

    def __init__(
        self,
        *,
        ranks: RankGroup,
        engines: RayEngines,
        generation: Generation,
        cuts: RoleMicroBatching,
        ending: Sequence[Callable[[], None]] = (),
        frees_cache: bool = False,
        runs_ahead: bool = False,
        is_swapping: bool = False,
    ) -> None:
        """`ending` is called at the end, in order: it gives devices and cluster back.

        `frees_cache` gives the replicas' memory of keys and values back after each generation.

        With `runs_ahead` replicas draw while ranks learn; they must have room for the weights, or
        with `is_swapping` for one version, which answers in progress go on with.
        """
        # Batches are small beside models: a second thread of the controller waits for a busy core.
        torch.set_num_threads(1)
        self.ranks = ranks
        self.engines = engines
        self.generation = generation
        self.cuts = cuts
        self.frees_cache = frees_cache
        self.watch = ranks.watch
        """Hears what ranks and replicas do."""
        self.watch.restart()
        self.publisher = WeightSync(ranks, engines)
        """How the ranks' weights get to the replicas."""
        self._asked: RolloutFuture = ReadyRollouts([])
        """What replicas draw already, one at a time."""
        self._gathering: Gathering | None = None
        """Weights that ranks gather after the last update of a step, until they are published."""
        self._ending = list(ending)
        self.ahead: AsyncGeneration | None = None
        """Draws while the ranks learn; None: they take turns."""
        if runs_ahead:
            self.ahead = AsyncGeneration(
                engines, generation, place=self.publisher.place, is_swapping=is_swapping
            )
        self.traces = ClusterTraces(ranks, engines, self.ahead)

    @property
    def device(self) -> torch.device:
        """Where batches are to be."""
        return torch.device("cpu")

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic."""
        return self.cuts.critic is not None

    @property
    def generates_remotely(self) -> bool:
        """Replicas do."""
        return True

    def submit(
        self,
        draws: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> RolloutFuture:
        """Ask for rollouts of every draw; those that the journal has are not made again."""
        if self.ahead is not None:
            return self.ahead.begin(
                draws, sampling, purpose=purpose, version=version, journal=journal
            )
        if not self._asked.done():
            return LazyRollouts(lambda: self._generate(draws, sampling, purpose, version, journal))
        self.publisher.demand(version)
        answers = self.generation.begin(
            self.engines, draws, sampling, purpose=purpose, version=version, journal=journal
        )
        self.engines.send()
        self._asked = LazyRollouts(lambda: self._finish(answers))
        return self._asked

    def publish(self, version: int) -> Publication:
        """Send the ranks' weights to the replicas, as this version.

        Ranks gather them after what they were called for before; replicas generate nothing with
        them before they have proved that they hold them.
        """
        if self.ahead is not None:
            return self.ahead.publish(version)
        gathering, self._gathering = self._gathering, None
        return self.publisher.begin(version, gathering)

    def keep_weights(self, versions: Collection[int]) -> None:
        """Only these versions will be submitted again, besides those published later."""
        if self.ahead is not None:
            self.ahead.keep(versions)

    def _generate(
        self,
        draws: Sequence[PromptRequest],
        sampling: Sampling,
        purpose: str,
        version: int,
        journal: WorkJournal | None,
    ) -> list[Group]:
        self._asked.result()  # engines do not say whose answers they give
        self.publisher.demand(version)
        answers = self.generation.begin(
            self.engines, draws, sampling, purpose=purpose, version=version, journal=journal
        )
        return self._finish(answers)

    def _finish(self, answers: Callable[[], list[Group]]) -> list[Group]:
        groups = answers()
        if self.frees_cache:
            self.engines.close()
        return groups

    def old_scores(self, batch: PackedBatch, *, sum_pi_squared: bool) -> dict[str, Tensor]:
        """Log-probabilities under the weights that the update starts from."""
        more = {"sum_pi_squared": sum_pi_squared}
        return self._scores("actor_scores", batch, self.cuts.log_probs, more)

    def reference_logp(self, batch: PackedBatch) -> Tensor:
        """Log-probabilities under the reference policy."""
        return self._scores("reference_scores", batch, self.cuts.reference)["logp"]

    def teacher_logp(self, batch: PackedBatch) -> Tensor:
        """Log-probabilities under the teacher."""
        return self._scores("teacher_scores", batch, self.cuts.log_probs)["logp"]

    def values(self, batch: PackedBatch) -> Tensor:
        """The critic's value before each token."""
        assert self.cuts.critic is not None, "the run has no critic"
        return self._scores("critic_scores", batch, self.cuts.critic)["values"]

    def _scores(
        self,
        method: str,
        batch: PackedBatch,
        passes: MicroBatching,
        more: Mapping[str, Any] | None = None,
    ) -> dict[str, Tensor]:
        bare = replace(batch, streams={})
        shares = split_batch(bare, passes, ranks=self.ranks.count)
        return join_shards(shares, self.ranks.each(method, [(s,) for s in shares], more), batch)

    def update_actor(
        self,
        batch: PackedBatch,
        objective: Objective,
        *,
        lr: float,
        seed: int,
        is_last: bool = False,
    ) -> RunningUpdate:
        """Start one optimizer step of the policy.

        After the last one ranks go on to gather and digest their weights, without another call.
        """
        statistics: Mapping[str, Tensor] = {}
        if objective.needs_statistics:
            logp = self._scores("actor_scores", batch, self.cuts.actor)["logp"]
            statistics = objective.statistics(policy_inputs(batch, logp), seed=seed)
        prepared, numbers = prepare_update(batch, objective, statistics)
        shares = split_batch(prepared, self.cuts.actor, ranks=self.ranks.count)
        more = {"objective": objective, "lr": lr, "statistics": numbers}
        asked = "update_actor", [(share,) for share in shares], more
        self._gathering = None
        if is_last and self.ahead is None:
            done, self._gathering = self.ranks.begin_and_publish(*asked)
        else:
            done = self.ranks.begin(*asked)
        self.publisher.change()
        return RunningUpdate(lambda: merge_policy_updates(batch, shares, done()))

    def update_critic(self, batch: PackedBatch, *, lr: float) -> UpdateResult:
        """One optimizer step of the critic."""
        assert self.cuts.critic is not None, "the run has no critic"
        cuts = self.cuts
        weights = aggregation_weights(
            cuts.value_aggregation, batch.rollouts, loss_scale_factor=cuts.value_scale
        )
        prepared = batch.with_streams(**{LOSS_WEIGHT: weights})
        shares = split_batch(prepared, self.cuts.critic, ranks=self.ranks.count)
        done = self.ranks.each("update_critic", [(share,) for share in shares], {"lr": lr})
        return merge_updates(shares, done)

    def describe(self) -> RankWeightDigests:
        """Digests of everything that learns: each rank's parts, added up."""
        return RankWeightDigests(self.ranks, self.publisher.digests)

    def not_finite(self) -> list[str]:
        """Names of the tensors of a checkpoint that hold NaN or infinity."""
        return sorted({name for names in self.ranks.all("not_finite") for name in names})

    def save(
        self,
        writer: CheckpointWriter,
        step: int,
        *,
        loop: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> None:
        """Make a checkpoint; every rank writes its shards into the folder, which all must see."""
        how = "begin_write" if writer.is_async else "write"

        def fill(folder: Path) -> None:
            self.ranks.all(how, folder.absolute())
            save_state(folder, "loop", loop)

        def is_written() -> bool:
            if self.ranks.is_over:
                raise WritersGone
            return all(self.ranks.all("is_written"))

        if writer.is_async:
            writer.save_remote(step, fill, is_written, facts=facts)
        else:
            writer.save_now(step, fill, facts=facts)

    def load(self, folder: Path) -> None:
        """Restore weights and optimizer state, whatever number of ranks saved them."""
        self.ranks.all("load", folder.absolute())
        self.publisher.forget()
        if self.ahead is not None:
            self.ahead.forget()

    def close(self) -> None:
        """End every process, and give the devices back, whatever goes wrong on the way."""
        endings: list[Callable[[], object]] = [
            self.ahead.close if self.ahead is not None else self.engines.drop,
            self.generation.close,
            lambda: flush_traces(self.engines.replica_pool.members),
            self.watch.write,
            self.engines.stop,
            self.ranks.stop,
            *self._ending,
        ]
        self._ending = []
        with ExitStack() as stack:
            for end in reversed(endings):
                stack.callback(end)
