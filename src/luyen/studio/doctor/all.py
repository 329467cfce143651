"""Every rule, gathered: importing this module declares them all."""

from luyen.studio.doctor import (
    rules_critic,
    rules_files,
    rules_hacking,
    rules_policy,
    rules_prompts,
    rules_reward,
    rules_roles,
    rules_sampler,
    rules_signal,
    rules_tools,
)
from luyen.studio.doctor.findings import RULES, Finding, Rule
from luyen.studio.doctor.read import RunRecord

__all__ = ["MODULES", "RULES", "Rule", "diagnose"]

MODULES = (
    rules_files,
    rules_signal,
    rules_policy,
    rules_sampler,
    rules_reward,
    rules_hacking,
    rules_prompts,
    rules_critic,
    rules_tools,
    rules_roles,
)


def diagnose(record: RunRecord) -> list[Finding]:
    """What every rule found: errors first, and among equals in the order of tuning."""
    found = [
        Finding(
            rule=known.id,
            severity=symptom.severity or known.severity,
            title=known.title,
            symptom=symptom,
        )
        for known in RULES.values()
        for symptom in known.look(record)
    ]
    return sorted(found, key=lambda finding: finding.rank)
