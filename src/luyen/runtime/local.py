"""Every role in this process: actor, rollout, reference and critic share one device."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor

from luyen.algorithms.objective import Objective
from luyen.base.errors import UserError
from luyen.checkpoint.background import CheckpointWriter
from luyen.checkpoint.finite import not_finite
from luyen.checkpoint.tensors import load_state
from luyen.engine.actor import ActorEngine, score
from luyen.engine.batch import PackedBatch
from luyen.engine.critic import CriticEngine
from luyen.engine.passes import Passes
from luyen.engine.step import Updated
from luyen.models import digest
from luyen.models.fingerprint import Fingerprint
from luyen.models.lora import adapter_off
from luyen.models.policy import Policy
from luyen.models.state import restore_parameters, trained_parameters
from luyen.rollout.protocol import RolloutEngine, Sampling
from luyen.rollout.resident import ResidentEngines
from luyen.rollout.single_turn import Draw, Group
from luyen.runtime.ahead import AheadGeneration
from luyen.runtime.fill import fill
from luyen.runtime.generation import Generation
from luyen.runtime.pending import (
    CompletedUpdate,
    InTurn,
    Pending,
    Publication,
    SharedWeights,
)
from luyen.runtime.roles import learned
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
        log_prob_passes: Passes,
        ref_passes: Passes,
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
        self.ahead: AheadGeneration | None = None
        """Draws while the actor learns; None: they take turns."""
        if isinstance(rollout, ResidentEngines):
            self.ahead = AheadGeneration(
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
    def draws_elsewhere(self) -> bool:
        """Nobody else draws, unless generation runs ahead on a thread of its own."""
        return self.ahead is not None

    def submit(
        self,
        draws: Sequence[Draw],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> Pending:
        """Ask for rollouts of every draw; those that the journal has are not made again."""
        if self.ahead is not None:
            return self.ahead.begin(
                draws, sampling, purpose=purpose, version=version, journal=journal
            )
        return InTurn(lambda: self._generate(draws, sampling, purpose, version, journal))

    def publish(self, version: int) -> Publication:
        """Nothing is sent: the engine samples with the actor's weights, or with copies if ahead."""
        return SharedWeights() if self.ahead is None else self.ahead.publish(version)

    def keep_weights(self, versions: Collection[int]) -> None:
        """Only these versions will be submitted again, besides those published later."""
        if self.ahead is not None:
            self.ahead.keep(versions)

    def _generate(
        self,
        draws: Sequence[Draw],
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
        assert isinstance(self.rollout, ResidentEngines)
        engine = self.rollout.hold(version, keep=keep)
        held = engine.fingerprint()
        if held is None:
            why = "it cannot say which weights it holds, so none can be given to it"
            fix = "let its `fingerprint` return the policy's parameters, or set max_staleness to 0"
            raise UserError(_FIELD, type(engine).__name__, why, fix)
        fill(held.weights, trained_parameters(self.actor.policy))
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

    def update_critic(self, batch: PackedBatch, *, lr: float) -> Updated:
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

    def describe(self) -> "DescribedHere":
        """Digests of everything that learns, as it is when they are asked for."""
        return DescribedHere(self)

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
class DescribedHere:
    """Digests of what the roles of this process hold, made when somebody asks."""

    def __init__(self, roles: LocalRoles) -> None:
        self._roles = roles

    @cached_property
    def _texts(self) -> tuple[dict[str, str], dict[str, str]]:
        """Moments and weights, in one transfer to the host."""
        moments, weights = learned(self._roles.state_dict())
        texts = digest.describe({**moments, **weights})
        return {name: texts[name] for name in moments}, {name: texts[name] for name in weights}

    def moments(self) -> Mapping[str, str]:
        """First moments of the optimizers, which hold the gradients."""
        return self._texts[0]

    def weights(self) -> Mapping[str, str]:
        """Parameters that learn, and their masters where they have any."""
        return self._texts[1]
