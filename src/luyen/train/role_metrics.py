"""Memory and work of the roles, as metrics of a step."""

from collections.abc import Mapping

from luyen.runtime.device_memory import device_bytes
from luyen.runtime.watch import GIB, RoleWatch
from luyen.telemetry.own_memory import peak_bytes

_PHASES = {"actor": ("time/log-probs", "time/update"), "rollout": ("time/generate",)}
"""Phases of the loop in which a role works, where all of them share one process."""


def role_metrics(watch: RoleWatch | None, times: Mapping[str, float]) -> dict[str, float]:
    """What the roles did since the step before; `times` are the seconds of its phases.

    Without a watch they share this process: its memory is the controller's, and a role is busy in
    the phases that need it.
    """
    device = device_bytes()
    found = {"role/controller/memory_gb": peak_bytes() / GIB}
    if device is not None:
        found["role/controller/device_gb"] = device / GIB
    return found | (_by_phases(times) if watch is None else watch.numbers())


def _by_phases(times: Mapping[str, float]) -> dict[str, float]:
    """Shares of the phases.

    Example:
        >>> _by_phases({"time/generate": 3.0, "time/update": 1.0})
        {'role/actor/busy': 0.25, 'role/rollout/busy': 0.75}
    """
    whole = sum(times.values())
    if whole <= 0:
        return {}
    return {
        f"role/{role}/busy": sum(times.get(name, 0.0) for name in names) / whole
        for role, names in _PHASES.items()
    }
