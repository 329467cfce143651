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
from luyen.rollout.protocol import RolloutEngine, Sampling, WeightReceiver
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
from luyen.runtime.weights import free_memory, load_weights
from luyen.telemetry.journal import WorkJournal

_FIELD = "actor_rollout_ref.rollout.name"


@final
class LocalRoles:
    """The roles of a run in one process. The engine samples with the actor's own weights.

    Only asynchronous generation copies them: each version that is needed has a copy.
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
        partial_rollouts: bool = False,
        teacher: Policy | None = None,
    ) -> None:
        """`reference` None with a LoRA actor means the actor with its adapter off.

        `frees_cache` frees the engine's KV cache after each generation. `VersionedEngines`
        generate while the actor trains; with `partial_rollouts`, unfinished responses continue
        with every new version.
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
        """Generations before which the engine's weights were compared with the actor's."""
        self.ahead: AsyncGeneration | None = None
        """Generates while the actor trains; None: generation and training alternate."""
        if isinstance(rollout, VersionedEngines):
            self.ahead = AsyncGeneration(
                rollout,
                generation,
                load_weights=self._load_weights,
                partial_rollouts=partial_rollouts,
            )

    @property
    def device(self) -> torch.device:
        """The device that batches must be on."""
        return self.actor.policy.device

    @property
    def has_critic(self) -> bool:
        """Whether there is a critic."""
        return self.critic is not None

    @property
    def watch(self) -> None:
        """None: no role has a process of its own."""
        return

    @property
    def traces(self) -> None:
        """None: no role has a process of its own."""
        return

    @property
    def generates_remotely(self) -> bool:
        """Whether generation runs on a thread of its own."""
        return self.ahead is not None

    def submit(
        self,
        requests: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> RolloutFuture:
        """Submit requests; rollouts that the journal has are not generated again."""
        if self.ahead is not None:
            return self.ahead.begin(
                requests, sampling, purpose=purpose, version=version, journal=journal
            )
        return LazyRollouts(lambda: self._generate(requests, sampling, purpose, version, journal))

    def publish(self, version: int) -> Publication:
        """Send the weights to a server; an engine in this process shares or copies them."""
        if self.ahead is not None:
            return self.ahead.publish(version)
        if isinstance(self.rollout, WeightReceiver):
            self.rollout.send_weights(version)
        return SharedWeights()

    def keep_weights(self, versions: Collection[int]) -> None:
        """Only these versions will be submitted again, besides those published later."""
        if self.ahead is not None:
            self.ahead.keep(versions)

    def _generate(
        self,
        requests: Sequence[PromptRequest],
        sampling: Sampling,
        purpose: str,
        version: int,
        journal: WorkJournal | None,
    ) -> list[Group]:
        self._refuse_other_weights(self.rollout, version)
        groups = self.generation.play(
            self.rollout, requests, sampling, purpose=purpose, version=version, journal=journal
        )
        if self.frees_cache:
            free_memory(self.rollout)
        return groups

    async def _load_weights(self, version: int, keep: Collection[int]) -> None:
        """Copy the actor's weights into an engine that is free, as this version."""
        assert isinstance(self.rollout, VersionedEngines)
        engine = self.rollout.hold(version, keep=keep)
        load_weights(engine, version, trained_parameters(self.actor.policy))
        self._refuse_other_weights(engine, version)

    def _refuse_other_weights(self, engine: RolloutEngine, version: int) -> None:
        """Raise a UserError if the engine's weights differ from the actor's."""
        fingerprint = engine.fingerprint()
        if fingerprint is None:
            return
        self.weight_checks += 1
        difference = fingerprint.first_difference(Fingerprint.of(self.actor.policy))
        if difference is not None:
            raise UserError(
                _FIELD,
                type(engine).__name__,
                f"it does not have version {version} of the weights: {difference}",
                "copy every trained parameter to the engine after each update, adapters too",
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
        """Weights and optimizer state of every trained role."""
        state: dict[str, Any] = {
            "actor": trained_parameters(self.actor.policy),
            "actor_optimizer": self.actor.optimizer.state_dict(),
        }
        if self.critic is not None:
            state["critic"] = trained_parameters(self.critic.model)
            state["critic_optimizer"] = self.critic.optimizer.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the result of `state_dict` in place: parameters keep their addresses."""
        restore_parameters(self.actor.policy, state["actor"])
        self.actor.optimizer.load_state_dict(state["actor_optimizer"])
        if self.ahead is not None:
            self.ahead.forget()
        if self.critic is not None:
            restore_parameters(self.critic.model, state["critic"])
            self.critic.optimizer.load_state_dict(state["critic_optimizer"])

    def weight_digests(self) -> "LocalWeightDigests":
        """Digests of every trained tensor, computed when they are read."""
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
        """Free the engine's memory, and close the tools."""
        if self.ahead is not None:
            self.ahead.close()
        self.generation.close()
        self.rollout.close()


@final
class LocalWeightDigests:
    """Digests of the roles' weights in this process, computed on first use."""

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


# Strict mode: every argument and result of the roles is pickled, as on a cluster.

STRICT_VARIABLE = "LUYEN_STRICT"
"""Environment variable: at 1, a run in one process uses `StrictRoles`."""
_Any = TypeVar("_Any")


def pickle_roundtrip(value: _Any) -> _Any:
    """The value as another process would receive it; a TypeError if it cannot be pickled.

    Example:
        >>> given = {"logp": torch.ones(2)}
        >>> arrived = pickle_roundtrip(given)
        >>> arrived["logp"].tolist(), arrived["logp"] is given["logp"]
        ([1.0, 1.0], False)
    """
    return pickle.loads(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL))


@final
class StrictRoles:
    """Roles whose arguments and results are pickled, so that caller and role share no object.

    It finds batches that cannot be sent, and callers that rely on getting their own tensor back.
    Conversations, journal and checkpoints pass unchanged: they stay with the controller on a
    cluster too.
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
        """The monitor of the roles' processes."""
        return self.inner.watch

    @property
    def generates_remotely(self) -> bool:
        """Whether submitted requests are generated while the caller continues."""
        return self.inner.generates_remotely

    @property
    def traces(self) -> TraceTarget | None:
        """Processes of the roles that can be traced."""
        return self.inner.traces

    def submit(
        self,
        requests: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> RolloutFuture:
        """Submit requests."""
        return self.inner.submit(
            requests, pickle_roundtrip(sampling), purpose=purpose, version=version, journal=journal
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

    def weight_digests(self) -> WeightDigests:
        """Digests of every trained tensor, as it is now."""
        return self.inner.weight_digests()

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
