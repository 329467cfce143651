"""Run every rule of the doctor on a run; importing this module declares all rules."""

from luyen.studio.doctor import rules_hacking, rules_reward, rules_rollouts, rules_run, rules_update
from luyen.studio.doctor.findings import RULES, Diagnosis, DoctorRule
from luyen.studio.doctor.record import RunRecord

__all__ = ["MODULES", "RULES", "DoctorRule", "diagnose"]

MODULES = (rules_run, rules_reward, rules_update, rules_rollouts, rules_hacking)


def diagnose(record: RunRecord) -> list[Diagnosis]:
    """What every rule found: errors first, and among equals in the order of tuning."""
    found = [
        Diagnosis(
            rule=known.id,
            severity=symptom.severity or known.severity,
            title=known.title,
            symptom=symptom,
        )
        for known in RULES.values()
        for symptom in known.look(record)
    ]
    return sorted(found, key=lambda finding: finding.rank)
