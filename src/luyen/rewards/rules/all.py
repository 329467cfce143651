"""Every rule, gathered: importing this module registers them all."""

from luyen.rewards.rules import (
    choice,
    code,
    exact,
    gsm8k,
    gym,
    ifeval,
    json_schema,
    length,
    math,
    numbers,
    repetition,
    safety,
    shape,
    tools,
)
from luyen.rewards.rules.rule import rule_rewards

__all__ = ["rule_rewards"]

MODULES = (
    choice,
    code,
    exact,
    gsm8k,
    gym,
    ifeval,
    json_schema,
    length,
    math,
    numbers,
    repetition,
    safety,
    shape,
    tools,
)
