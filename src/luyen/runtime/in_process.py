"""Every role in this process on one device; in strict mode every message is pickled."""

import pickle
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from luyen.algorithms.objective import Objective
from luyen.base.errors import UserError
from luyen.checkpoint.tensors import load_state, not_finite
from luyen.checkpoint.writer import CheckpointWriter
from luyen.engine.actor import ActorEngine, score
from luyen.engine.batch import PackedBatch
from luyen.engine.batch_shards import MicroBatching
from luyen.engine.critic import CriticEngine
from luyen.engine.step import UpdateResult
from luyen.models import trained_weights
from luyen.models.lora import adapter_off
from luyen.models.policy import Policy
from luyen.models.trained_weights import Fingerprint, restore_parameters, trained_parameters
from luyen.rollout.engines import VersionedEngines
from luyen.rollout.protocol import RolloutEngine, Sampling
from luyen.rollout.single_turn import Group, PromptRequest
from luyen.runtime.futures import (
    CompletedUpdate,
    LazyRollouts,
    Publication,
    RolloutFuture,
    SharedWeights,
)
from luyen.runtime.generation import AsyncGeneration, Generation
from luyen.runtime.monitoring import RoleMonitor, TraceTarget
from luyen.runtime.roles import Roles, WeightDigests, split_learned_state
from luyen.runtime.weights import copy_into
from luyen.telemetry.journal import WorkJournal

_FIELD = "actor_rollout_ref.rollout.name"


@final
class LocalRoles:
    """What the loop calls. The engine samples with the actor's own weights: none are copied.

    Only where generation runs ahead does each version that is needed have a copy.
    """

    def __init__(
        self,
        *,
        actor: ActorEngine,
        rollout: RolloutEngine,
        generation: Generation,
        reference: Policy | None,
        critic: CriticEngine | None,
        log_prob_passes: MicroBatching,
        ref_passes: MicroBatching,
        frees_cache: bool = False,
        is_swapping: bool = False,
        teacher: Policy | None = None,
    ) -> None:
        """`reference` None with a LoRA actor means the actor with its adapter off.

        `frees_cache` gives the engine's memory back after each generation. Engines that hold
        versions of their own draw while the actor learns; with `is_swapping`, answers in progress
        get every new one.
        """
        self.actor = actor
        self.rollout = rollout
        self.generation = generation
        self.reference = reference
        self.teacher = teacher
        self.critic = critic
        self.log_prob_passes = log_prob_passes
        self.ref_passes = ref_passes
        self.frees_cache = frees_cache
        self.weight_checks = 0
        """Generations before which the engine's weights were found to be the actor's."""
        self.ahead: AsyncGeneration | None = None
        """Draws while the actor learns; None: they take turns."""
        if isinstance(rollout, VersionedEngines):
            self.ahead = AsyncGeneration(
                rollout, generation, place=self._place, is_swapping=is_swapping
            )

    @property
    def device(self) -> torch.device:
        """Where batches are to be."""
        return self.actor.policy.device

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic."""
        return self.critic is not None

    @property
    def watch(self) -> None:
        """Nobody need be watched: this process does everything."""
        return

    @property
    def traces(self) -> None:
        """No other process need be traced."""
        return

    @property
    def generates_remotely(self) -> bool:
        """Nobody else draws, unless generation runs ahead on a thread of its own."""
        return self.ahead is not None

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
        return LazyRollouts(lambda: self._generate(draws, sampling, purpose, version, journal))

    def publish(self, version: int) -> Publication:
        """Nothing is sent: the engine samples with the actor's weights, or with copies if ahead."""
        return SharedWeights() if self.ahead is None else self.ahead.publish(version)

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
        self._refuse_other_weights(self.rollout, version)
        groups = self.generation.play(
            self.rollout, draws, sampling, purpose=purpose, version=version, journal=journal
        )
        if self.frees_cache:
            self.rollout.close()
        return groups

    async def _place(self, version: int, keep: Collection[int]) -> None:
        """Copy the actor's weights into an engine that is free, as this version."""
        assert isinstance(self.rollout, VersionedEngines)
        engine = self.rollout.hold(version, keep=keep)
        held = engine.fingerprint()
        if held is None:
            why = "it cannot say which weights it holds, so none can be given to it"
            fix = "let its `fingerprint` return the policy's parameters, or set max_staleness to 0"
            raise UserError(_FIELD, type(engine).__name__, why, fix)
        copy_into(held.weights, trained_parameters(self.actor.policy))
        self._refuse_other_weights(engine, version)

    def _refuse_other_weights(self, engine: RolloutEngine, version: int) -> None:
        """The engine draws with the actor's weights, or not at all."""
        held = engine.fingerprint()
        if held is None:
            return
        self.weight_checks += 1
        difference = held.first_difference(Fingerprint.of(self.actor.policy))
        if difference is not None:
            raise UserError(
                _FIELD,
                type(engine).__name__,
                f"it would not draw with version {version} of the weights: {difference}",
                "hand every parameter that learns to the engine after each update, adapters too",
            )

    def old_scores(self, batch: PackedBatch, *, sum_pi_squared: bool) -> dict[str, Tensor]:
        """Log-probabilities under the weights that the update starts from."""
        return score(
            self.actor.policy,
            batch,
            self.log_prob_passes,
            temperature=self.actor.temperature,
            sum_pi_squared=sum_pi_squared,
        )

    def reference_logp(self, batch: PackedBatch) -> Tensor:
        """Log-probabilities under the reference policy."""
        policy = self.reference or self.actor.policy
        off = adapter_off(policy) if self.reference is None else nullcontext()
        with off:
            scored = score(policy, batch, self.ref_passes, temperature=self.actor.temperature)
        return scored["logp"]

    def teacher_logp(self, batch: PackedBatch) -> Tensor:
        """Log-probabilities under the teacher."""
        assert self.teacher is not None, "the run has no teacher"
        temperature = self.actor.temperature
        return score(self.teacher, batch, self.log_prob_passes, temperature=temperature)["logp"]

    def values(self, batch: PackedBatch) -> Tensor:
        """The critic's value before each token."""
        assert self.critic is not None, "the run has no critic"
        return self.critic.values(batch)

    def update_actor(
        self,
        batch: PackedBatch,
        objective: Objective,
        *,
        lr: float,
        seed: int,
        is_last: bool = False,
    ) -> CompletedUpdate:
        """Take one optimizer step of the policy."""
        del is_last
        return CompletedUpdate(self.actor.update(batch, objective, lr=lr, seed=seed))

    def update_critic(self, batch: PackedBatch, *, lr: float) -> UpdateResult:
        """One optimizer step of the critic."""
        assert self.critic is not None, "the run has no critic"
        return self.critic.update(batch, lr=lr)

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer state of every role that learns."""
        state: dict[str, Any] = {
            "actor": trained_parameters(self.actor.policy),
            "actor_optimizer": self.actor.optimizer.state_dict(),
        }
        if self.critic is not None:
            state["critic"] = trained_parameters(self.critic.model)
            state["critic_optimizer"] = self.critic.optimizer.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave, in place: parameters keep their addresses."""
        restore_parameters(self.actor.policy, state["actor"])
        self.actor.optimizer.load_state_dict(state["actor_optimizer"])
        if self.ahead is not None:
            self.ahead.forget()
        if self.critic is not None:
            restore_parameters(self.critic.model, state["critic"])
            self.critic.optimizer.load_state_dict(state["critic_optimizer"])

    def describe(self) -> "LocalWeightDigests":
        """Digests of everything that learns, as it is when they are asked for."""
        return LocalWeightDigests(self)

    def not_finite(self) -> list[str]:
        """Names of the tensors of a checkpoint that hold NaN or infinity."""
        return not_finite(self.state_dict())

    def save(
        self,
        writer: CheckpointWriter,
        step: int,
        *,
        loop: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> None:
        """Make a checkpoint of weights, optimizer state and the loop's own state."""
        writer.save(step, {**self.state_dict(), "loop": loop}, facts=facts)

    def load(self, folder: Path) -> None:
        """Restore weights and optimizer state, whatever number of ranks saved them."""
        self.load_state_dict({name: load_state(folder, name) for name in self.state_dict()})

    def close(self) -> None:
        """Free the engine's memory, and let the tools go."""
        if self.ahead is not None:
            self.ahead.close()
        self.generation.close()
        self.rollout.close()


@final
class LocalWeightDigests:
    """Digests of what the roles of this process hold, made when somebody asks."""

    def __init__(self, roles: LocalRoles) -> None:
        self._roles = roles

    @cached_property
    def _texts(self) -> tuple[dict[str, str], dict[str, str]]:
        """Moments and weights, in one transfer to the host."""
        moments, weights = split_learned_state(self._roles.state_dict())
        texts = trained_weights.tensor_digests({**moments, **weights})
        return {name: texts[name] for name in moments}, {name: texts[name] for name in weights}

    def moments(self) -> Mapping[str, str]:
        """First moments of the optimizers, which hold the gradients."""
        return self._texts[0]

    def weights(self) -> Mapping[str, str]:
        """Parameters that learn, and their masters where they have any."""
        return self._texts[1]


# Roles of this process behind the walls of a cluster: what goes in and out is pickled.
#
# In one process a batch could hold what cannot travel, or a caller could lean on being handed
# the very tensor it gave. On Ray neither works. Behind this wrapper neither works here.

STRICT_VARIABLE = "LUYEN_STRICT"
"""Set to 1, a run in one process is held to this."""
_Any = TypeVar("_Any")


def pickle_roundtrip(value: _Any) -> _Any:
    """The value as another process would be given it; a TypeError where it cannot travel.

    Example:
        >>> given = {"logp": torch.ones(2)}
        >>> arrived = pickle_roundtrip(given)
        >>> arrived["logp"].tolist(), arrived["logp"] is given["logp"]
        ([1.0, 1.0], False)
    """
    return pickle.loads(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


@final
class StrictRoles:
    """The roles it is given, reached as on a cluster: nothing is shared but what is written there.

    Conversations, journal and checkpoints stay on the controller's side on a cluster, too, and
    pass unchanged.
    """

    def __init__(self, inner: Roles) -> None:
        self.inner = inner
        self.generation: Generation = inner.generation

    @property
    def device(self) -> torch.device:
        """Where batches are to be."""
        return self.inner.device

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic."""
        return self.inner.has_critic

    @property
    def watch(self) -> RoleMonitor | None:
        """What hears of the processes of the roles."""
        return self.inner.watch

    @property
    def generates_remotely(self) -> bool:
        """Whether what is submitted is drawn while the caller does something else."""
        return self.inner.generates_remotely

    @property
    def traces(self) -> TraceTarget | None:
        """Processes of the roles that can be traced."""
        return self.inner.traces

    def submit(
        self,
        draws: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> RolloutFuture:
        """Ask for rollouts of every draw."""
        return self.inner.submit(
            draws, pickle_roundtrip(sampling), purpose=purpose, version=version, journal=journal
        )

    def publish(self, version: int) -> Publication:
        """Send the actor's weights to the engines that generate, as this version."""
        return self.inner.publish(version)

    def keep_weights(self, versions: Collection[int]) -> None:
        """Only these versions will be submitted again, besides those published later."""
        self.inner.keep_weights(versions)

    def old_scores(self, batch: PackedBatch, *, sum_pi_squared: bool) -> dict[str, Tensor]:
        """Log-probabilities under the weights that the update starts from."""
        return pickle_roundtrip(
            self.inner.old_scores(pickle_roundtrip(batch), sum_pi_squared=sum_pi_squared)
        )

    def reference_logp(self, batch: PackedBatch) -> Tensor:
        """Log-probabilities under the reference policy."""
        return pickle_roundtrip(self.inner.reference_logp(pickle_roundtrip(batch)))

    def teacher_logp(self, batch: PackedBatch) -> Tensor:
        """Log-probabilities under the teacher."""
        return pickle_roundtrip(self.inner.teacher_logp(pickle_roundtrip(batch)))

    def values(self, batch: PackedBatch) -> Tensor:
        """The critic's value before each token."""
        return pickle_roundtrip(self.inner.values(pickle_roundtrip(batch)))

    def update_actor(
        self,
        batch: PackedBatch,
        objective: Objective,
        *,
        lr: float,
        seed: int,
        is_last: bool = False,
    ) -> CompletedUpdate:
        """One optimizer step of the policy."""
        given = pickle_roundtrip((batch, objective))
        update = self.inner.update_actor(*given, lr=lr, seed=seed, is_last=is_last)
        return CompletedUpdate(pickle_roundtrip(update.result()))

    def update_critic(self, batch: PackedBatch, *, lr: float) -> UpdateResult:
        """One optimizer step of the critic."""
        return pickle_roundtrip(self.inner.update_critic(pickle_roundtrip(batch), lr=lr))

    def describe(self) -> WeightDigests:
        """Digests of everything that learns, as it is now."""
        return self.inner.describe()

    def not_finite(self) -> list[str]:
        """Names of the tensors of a checkpoint that hold NaN or infinity."""
        return pickle_roundtrip(self.inner.not_finite())

    def save(
        self,
        writer: CheckpointWriter,
        step: int,
        *,
        loop: Mapping[str, Any],
        facts: Mapping[str, Any],
    ) -> None:
        """Make a checkpoint of weights, optimizer state and the loop's own state."""
        self.inner.save(writer, step, loop=pickle_roundtrip(loop), facts=pickle_roundtrip(facts))

    def load(self, folder: Path) -> None:
        """Restore weights and optimizer state, whatever number of ranks saved them."""
        self.inner.load(pickle_roundtrip(folder))

    def close(self) -> None:
        """Free everything."""
        self.inner.close()
