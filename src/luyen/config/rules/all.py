"""Every rule, gathered: importing this module declares them all."""

from luyen.config.rules import (
    batch,
    correction,
    credit,
    device,
    inputs,
    kl,
    life,
    loss,
    memory,
    model,
    pools,
    profile,
    rewards,
    rollout,
    saving,
    sharding,
    turns,
    unbuilt,
    watchdog,
)
from luyen.config.rules.rule import RULES, Rule

__all__ = ["RULES", "Rule"]

MODULES = (
    batch,
    credit,
    correction,
    device,
    inputs,
    kl,
    life,
    loss,
    memory,
    model,
    pools,
    profile,
    rewards,
    rollout,
    saving,
    sharding,
    turns,
    unbuilt,
    watchdog,
)
