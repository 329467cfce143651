"""Every rule, gathered: importing this module declares them all."""

from luyen.config.rules import (
    advantages,
    batch,
    data,
    loss,
    megatron,
    model,
    multi_turn,
    optim,
    reward,
    reward_model,
    rollout,
    run,
    servers,
    stages,
)
from luyen.config.rules.rule import RULES, Rule

__all__ = ["RULES", "Rule"]

MODULES = (
    advantages,
    batch,
    data,
    loss,
    megatron,
    model,
    multi_turn,
    optim,
    reward,
    reward_model,
    rollout,
    run,
    servers,
    stages,
)
