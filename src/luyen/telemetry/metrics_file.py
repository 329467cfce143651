"""Reading `metrics.jsonl`: the steps of a run, and what two runs may be compared by."""

from dataclasses import dataclass
from pathlib import Path
from typing import final

from luyen.base.files import read_lines

CLOCK = "time/"
"""How the name of a metric begins that depends on the clock."""


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


def read_metrics(path: Path) -> list[StepMetrics]:
    """The steps in a metrics file, in order; a torn last line is left out."""
    steps: list[StepMetrics] = []
    for line in read_lines(path):
        values = {name: float(value) for name, value in line.items() if name != "step"}
        steps.append(StepMetrics(step=int(line["step"]), values=values))
    return steps


def series(steps: list[StepMetrics], name: str) -> tuple[list[int], list[float]]:
    """Steps that have a metric, and its values there."""
    having = [(s.step, s.values[name]) for s in steps if name in s.values]
    return [step for step, _ in having], [value for _, value in having]
