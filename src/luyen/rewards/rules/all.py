"""Every rule, gathered: importing this module registers them all."""

from luyen.rewards.rules import answers, code, format, ifeval, length, tools
from luyen.rewards.rules.rule import rule_rewards

__all__ = ["rule_rewards"]

MODULES = (
    answers,
    code,
    answers,
    answers,
    answers,
    ifeval,
    format,
    length,
    answers,
    answers,
    length,
    tools,
    format,
    tools,
)
