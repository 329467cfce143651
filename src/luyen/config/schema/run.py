"""The root of the configuration."""

from typing import Any, Self

from pydantic import BaseModel, PrivateAttr, model_validator

from luyen.config.schema.actor import Actor
from luyen.config.schema.algorithm import Algorithm
from luyen.config.schema.block import Block, block
from luyen.config.schema.critic import Critic
from luyen.config.schema.data import Data
from luyen.config.schema.derived import derived_values
from luyen.config.schema.distill import Distill
from luyen.config.schema.model import Model
from luyen.config.schema.preference import Preference
from luyen.config.schema.reward import Reward
from luyen.config.schema.reward_training import RewardTraining
from luyen.config.schema.rollout import Ref, Rollout
from luyen.config.schema.sandbox import Sandbox
from luyen.config.schema.sft import Sft
from luyen.config.schema.trainer import Trainer


class ActorRolloutRef(Block):
    """The policy in its three roles: trained, sampled from, and frozen as a reference."""

    model: Model = block(Model, "The policy's weights.")
    actor: Actor = block(Actor, "The policy update.")
    rollout: Rollout = block(Rollout, "Generation.")
    ref: Ref = block(Ref, "The reference policy.")


class RunConfig(Block):
    """A whole run: the blocks of any run, and one for each offline stage."""

    data: Data = block(Data, "What is read and how much of it makes a step.")
    actor_rollout_ref: ActorRolloutRef = block(ActorRolloutRef, "The policy in its three roles.")
    critic: Critic = block(Critic, "The value model.")
    reward: Reward = block(Reward, "What scores rollouts.")
    algorithm: Algorithm = block(Algorithm, "What is learned.")
    trainer: Trainer = block(Trainer, "The life of a run.")
    sandbox: Sandbox = block(Sandbox, "Demands on where code of the policy runs.")
    sft: Sft = block(Sft, "`trainer.stage: sft`.")
    preference: Preference = block(Preference, "`trainer.stage: preference`.")
    reward_training: RewardTraining = block(RewardTraining, "`trainer.stage: reward_model`.")
    distill: Distill = block(Distill, "`trainer.stage: distill`, and a teacher in `rl`.")

    @model_validator(mode="after")
    def _with_derived(self) -> Self:
        """Keys that nobody wrote get the values that others decide; they still count as unset."""
        for path, value in derived_values(self).items():
            *blocks, name = path.split(".")
            inner: BaseModel = self
            for block_name in blocks:
                inner = vars(inner)[block_name]
            vars(inner)[name] = value
        return self

    _references: dict[str, Any] = PrivateAttr(default_factory=dict[str, Any])

    @property
    def references(self) -> dict[str, Any]:
        """Key -> what was written there, for values that came from the environment."""
        return self._references

    def with_references(self, references: dict[str, Any]) -> Self:
        """The same configuration, whose values of the environment are known as such."""
        made = self.model_copy()
        made._references = dict(references)
        return made
