"""`RunConfig`, the root of the configuration, and the block `sandbox`."""

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, PrivateAttr, model_validator

from luyen.config.schema.actor_rollout_ref import ActorConfig, RefConfig, RolloutConfig
from luyen.config.schema.algorithm import (
    AlgorithmConfig,
    CriticConfig,
    DistillConfig,
    PreferenceConfig,
    RewardTrainingConfig,
    SftConfig,
)
from luyen.config.schema.block import Block, as_tuple, block, derived_values, key
from luyen.config.schema.data import DataConfig
from luyen.config.schema.model import ModelConfig
from luyen.config.schema.reward import RewardConfig
from luyen.config.schema.trainer import TrainerConfig

# `sandbox`: what must hold around code that a policy writes.

Promises = Annotated[
    tuple[Literal["files", "network", "processes", "memory", "verdicts"], ...],
    BeforeValidator(as_tuple),
]


class SandboxConfig(Block):
    """Demands on the sandbox of the rule `code` and of the tool `python`."""

    require: Promises = key(
        (),
        "Promises without which the run is refused: files, network, processes, memory, if this "
        "machine cannot keep them; verdicts, if a test runs where the program could forge it.",
    )


class ActorRolloutRefConfig(Block):
    """The policy in its three roles: trained, sampled from, and frozen as a reference."""

    model: ModelConfig = block(ModelConfig, "The policy's weights.")
    actor: ActorConfig = block(ActorConfig, "The policy update.")
    rollout: RolloutConfig = block(RolloutConfig, "Generation.")
    ref: RefConfig = block(RefConfig, "The reference policy.")


class RunConfig(Block):
    """A whole run: the blocks of any run, and one for each offline stage."""

    data: DataConfig = block(DataConfig, "What is read and how much of it makes a step.")
    actor_rollout_ref: ActorRolloutRefConfig = block(
        ActorRolloutRefConfig, "The policy in its three roles."
    )
    critic: CriticConfig = block(CriticConfig, "The value model.")
    reward: RewardConfig = block(RewardConfig, "What scores rollouts.")
    algorithm: AlgorithmConfig = block(AlgorithmConfig, "What is learned.")
    trainer: TrainerConfig = block(TrainerConfig, "Devices, length, checkpoints and logging.")
    sandbox: SandboxConfig = block(SandboxConfig, "Demands on where code of the policy runs.")
    sft: SftConfig = block(SftConfig, "`trainer.stage: sft`.")
    preference: PreferenceConfig = block(PreferenceConfig, "`trainer.stage: preference`.")
    reward_training: RewardTrainingConfig = block(
        RewardTrainingConfig, "`trainer.stage: reward_model`."
    )
    distill: DistillConfig = block(
        DistillConfig, "`trainer.stage: distill`, and a teacher in `rl`."
    )

    @model_validator(mode="after")
    def _with_derived(self) -> Self:
        """Fill derived defaults from other keys; the filled keys still count as unset."""
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
