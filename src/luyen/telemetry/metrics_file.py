"""`metrics.jsonl`: the steps of a run, and what two runs may be compared by.

A line holds a checksum of its other content. It is a string, where every metric is a number, so
that a line whose checksum has lost its name is found as well.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from luyen.base.errors import UserError
from luyen.base.files import json_line, read_lines, write_whole

CLOCK = ("time/", "role/", "wait/", "publish/", "judging/")
"""How the name of a metric begins that depends on the clock, on where the roles of a run are, or on
what was judged before."""
_STEP, _CHECK = "step", "check"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What one step measured.

    Example:
        >>> StepMetrics(step=1, values={"reward/mean": 0.5, "time/step": 1.2}).timeless()
        {'reward/mean': 0.5}
    """

    step: int
    """The step."""
    values: dict[str, float]
    """Metric to value; NaN and infinities as they were."""

    def timeless(self) -> dict[str, float]:
        """The values that the same run gives again on any machine that repeats its numbers."""
        return {name: v for name, v in self.values.items() if not name.startswith(CLOCK)}


def metrics_line(step: int, values: Mapping[str, float]) -> str:
    """The line of a step: sorted keys, exact floats, and the checksum.

    Example:
        >>> metrics_line(1, {"loss": 0.5})
        '{"check": "crc32:fdbc76c1", "loss": 0.5, "step": 1}\\n'
    """
    entry = {**{name: float(value) for name, value in values.items()}, _STEP: step}
    return json_line({**entry, _CHECK: _check_of(entry)})


def read_metrics(path: Path) -> list[StepMetrics]:
    """The steps in a metrics file, in order; a torn last line is left out.

    A UserError when a line is not as it was written. Lines without a checksum are believed: they
    were written by an older version, or by hand.
    """
    return [_step_of(path, number, line) for number, line in enumerate(read_lines(path), 1)]


def keep_before(path: Path, first_step: int) -> None:
    """Drop the lines from `first_step` on, and the torn end; the others must be sound."""
    if path.is_file():
        kept = [s for s in read_metrics(path) if s.step < first_step] if first_step else []
        write_whole(path, "".join(metrics_line(s.step, s.values) for s in kept))


def _step_of(path: Path, number: int, line: dict[str, Any]) -> StepMetrics:
    entry = {name: value for name, value in line.items() if name != _CHECK}
    try:
        found = StepMetrics(
            step=int(entry[_STEP]),
            values={name: float(value) for name, value in entry.items() if name != _STEP},
        )
        is_sound = _CHECK not in line or line[_CHECK] == _check_of(entry)
    except (LookupError, TypeError, ValueError):
        found, is_sound = None, False
    if found is None or not is_sound:
        why = f"line {number} is not that of a step as it was written"
        raise UserError("file", str(path), why, "restore it from a copy, or remove the line")
    return found


def _check_of(entry: Mapping[str, Any]) -> str:
    return f"crc32:{zlib.crc32(json_line(entry).encode(errors='surrogatepass')):08x}"


def series(steps: list[StepMetrics], name: str) -> tuple[list[int], list[float]]:
    """Steps that have a metric, and its values there."""
    having = [(s.step, s.values[name]) for s in steps if name in s.values]
    return [step for step, _ in having], [value for _, value in having]
