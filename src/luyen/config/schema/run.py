"""The root of the configuration."""

from luyen.config.schema.actor import Actor
from luyen.config.schema.algorithm import Algorithm
from luyen.config.schema.block import Block, block
from luyen.config.schema.critic import Critic
from luyen.config.schema.data import Data
from luyen.config.schema.distill import Distill
from luyen.config.schema.model import Model
from luyen.config.schema.preference import Preference
from luyen.config.schema.reward import Reward
from luyen.config.schema.reward_training import RewardTraining
from luyen.config.schema.rollout import Ref, Rollout
from luyen.config.schema.sft import Sft
from luyen.config.schema.trainer import Trainer


class ActorRolloutRef(Block):
    """The policy in its three roles: trained, sampled from, and frozen as a reference."""

    model: Model = block(Model, "The policy's weights.")
    actor: Actor = block(Actor, "The policy update.")
    rollout: Rollout = block(Rollout, "Generation.")
    ref: Ref = block(Ref, "The reference policy.")


class RunConfig(Block):
    """A whole run: six blocks of any run, and one for each offline stage."""

    data: Data = block(Data, "What is read and how much of it makes a step.")
    actor_rollout_ref: ActorRolloutRef = block(ActorRolloutRef, "The policy in its three roles.")
    critic: Critic = block(Critic, "The value model.")
    reward: Reward = block(Reward, "What scores rollouts.")
    algorithm: Algorithm = block(Algorithm, "What is learned.")
    trainer: Trainer = block(Trainer, "The life of a run.")
    sft: Sft = block(Sft, "`trainer.stage: sft`.")
    preference: Preference = block(Preference, "`trainer.stage: preference`.")
    reward_training: RewardTraining = block(RewardTraining, "`trainer.stage: reward_model`.")
    distill: Distill = block(Distill, "`trainer.stage: distill`, and a teacher in `rl`.")
