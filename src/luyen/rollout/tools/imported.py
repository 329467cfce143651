"""Modules and classes of users, imported; whatever goes wrong there is said with the place."""

from types import ModuleType
from typing import Any

from luyen.base.errors import UserError
from luyen.base.foreign import boundary
from luyen.base.paths import expanded
from luyen.base.suggest import did_you_mean
from luyen.rollout.tools.foreign import line_of, place_of
from luyen.sandbox.worker import module_of


def imported_module(place: str, field: str) -> ModuleType:
    """A module by its dotted name, or by the path of its file; a UserError when that fails.

    Example:
        >>> imported_module("json", "demo").__name__
        'json'
    """
    faults: list[BaseException] = []
    with boundary(faults):
        return module_of(str(expanded(place).resolve()) if place.endswith(".py") else place)
    fault = faults[0]
    if isinstance(fault, ModuleNotFoundError) and str(fault.name).partition(".")[0] == "verl":
        why = f"it imports `{fault.name}`, and verl is not installed"
        fix = "drop the import and the base class, which is not needed here, or install verl"
        raise UserError(field, place, why, fix) from fault
    why = f"importing it failed: {line_of(fault)} ({place_of(fault)})"
    raise UserError(field, place, why, "mend the name or the file") from fault


def imported_name(target: str, field: str) -> Any:
    """What `FILE.py:NAME` or `PACKAGE.MODULE.NAME` stands for.

    Example:
        >>> imported_name("json.JSONDecoder", "demo").__name__
        'JSONDecoder'
    """
    place, _, name = target.rpartition(":" if ".py:" in target else ".")
    if not place:
        raise UserError(field, target, "it names no module", "write PACKAGE.MODULE.NAME")
    held = vars(imported_module(place, field))
    if name not in held:
        raise UserError(field, target, f"{place} has no `{name}`", did_you_mean(name, held))
    return held[name]
