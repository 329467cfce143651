"""Every rule, gathered: importing this module registers them all."""

from luyen.rewards.rules import choice, exact, gsm8k, gym, length, math, numbers, shape
from luyen.rewards.rules.rule import rule_rewards

__all__ = ["rule_rewards"]

MODULES = (choice, exact, gsm8k, gym, length, math, numbers, shape)
