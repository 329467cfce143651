"""Schema check of a checkpoint's manifest: a valid checksum does not prove that we wrote it."""

from collections.abc import Mapping
from typing import Any


def fault_of(manifest: Mapping[str, Any], *, folder_step: int | None) -> str | None:
    """What is wrong with the parts of a manifest; None: nothing.

    Example:
        >>> fault_of({"step": 1, "files": {}, "facts": []}, folder_step=1)
        '`facts` is no object'
    """
    step, files, facts = (manifest.get(name) for name in ("step", "files", "facts"))
    if not isinstance(step, int) or step < 0:
        return "`step` is no whole number from 0 on"
    if folder_step not in (None, step):
        return f"it is that of step {step}"
    if not isinstance(files, dict) or not all(_is_file(one) for one in files.values()):
        return "`files` does not hold size and SHA-256 of each file"
    if not isinstance(facts, dict):
        return "`facts` is no object"
    metrics = facts.get("metrics", {})
    if not isinstance(metrics, dict) or not all(_is_number(one) for one in metrics.values()):
        return "`facts.metrics` does not hold numbers"
    if not isinstance(facts.get("chain", ""), str | None):
        return "`facts.chain` is no hash"
    return None


def _is_file(value: object) -> bool:
    return isinstance(value, dict) and {"bytes", "sha256"} <= value.keys()


def _is_number(value: object) -> bool:
    # What is not finite is written as text.
    return isinstance(value, int | float) or value in ("nan", "inf", "-inf", None)
