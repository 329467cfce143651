"""`critic`: the value model of estimators that need one."""

from luyen.config.schema.actor import Aggregation
from luyen.config.schema.block import Block, block, key
from luyen.config.schema.optim import CriticOptim


class CriticModel(Block):
    """The critic's weights."""

    path: str | None = key(None, "Directory or hub id; null: as the actor, with a value head.")


class Critic(Block):
    """The value model and its update."""

    enable: bool | None = key(None, "Train a critic; null: exactly when the estimator needs one.")
    model: CriticModel = block(CriticModel, "The critic's weights.")
    ppo_mini_batch_size: int | None = key(
        None, "Prompts of one optimizer step; null: as the actor.", ge=1
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "Sequences of one forward pass; null: as the actor.", ge=1
    )
    use_dynamic_bsz: bool | None = key(None, "Fill micro-batches by tokens; null: as the actor.")
    ppo_max_token_len_per_gpu: int | None = key(
        None, "Token budget of a micro-batch; null: as the actor.", ge=1
    )
    ppo_epochs: int | None = key(None, "Passes over a step's samples; null: as the actor.", ge=1)
    cliprange_value: float | None = key(
        0.5,
        "How far a value may move from its old one before the loss clips; null: no clip.",
        gt=0,
    )
    loss_agg_mode: Aggregation | None = key(None, "Aggregation; null: as the actor.")
    optim: CriticOptim = block(CriticOptim, "Optimizer and schedule.")
