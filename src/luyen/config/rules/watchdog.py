"""S: how long a phase may stand still."""

from collections.abc import Iterator

from luyen.base.heartbeat import PHASES
from luyen.base.suggest import did_you_mean
from luyen.config.rules.rule import Finding, Situation, rule

_BUDGETS = "trainer.watchdog.budgets"


@rule("S19", "error")
def watched_phases_exist(s: Situation) -> Iterator[Finding]:
    """Budgets of the watchdog are those of phases, and no time is negative."""
    for name, seconds in s.config.trainer.watchdog.budgets.items():
        if name not in PHASES:
            why, fix = f"a run has no phase `{name}`", did_you_mean(name, PHASES)
            yield Finding(field=_BUDGETS, why=why, fix=fix)
        if seconds < 0:
            why = f"{name} cannot hang for {seconds:g} s"
            yield Finding(field=_BUDGETS, why=why, fix="give seconds, or 0 to leave it unwatched")


@rule("S20", "warning")
def policy_has_a_watchdog(s: Situation) -> Iterator[Finding]:
    """`on_hang` is changed only where something is watched."""
    watchdog = s.config.trainer.watchdog
    is_off = not watchdog.budget_s and not any(watchdog.budgets.values())
    if is_off and watchdog.on_hang == "stop":
        why = "no phase has a budget, so that nothing is ever found to hang"
        yield Finding(field="trainer.watchdog.on_hang", why=why, fix="set budget_s, or drop it")
