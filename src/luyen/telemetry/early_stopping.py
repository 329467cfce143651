"""Early stopping: a run ends when a metric has not improved for a while.

What is known of the metric follows from the recorded steps alone, so a run that was killed and goes
on reads its record and stops at the step at which it would have stopped.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, final

from luyen.telemetry.metrics import StepMetrics


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EarlyStopping:
    """Stop when `metric` has not improved in `patience` measurements, one after the other.

    Given to `luyen.train(callbacks=[...])`, or as `trainer.early_stopping` in a configuration.

    Example:
        >>> EarlyStopping(metric="val/accuracy", patience=2).improves(0.5, on=0.4)
        True
    """

    metric: str
    """Name of a metric of the run, of training or validation."""
    patience: int = 3
    """Measurements without an improvement after which the run stops."""
    minimum_change: float = 0.0
    """What a value must be better by to count as an improvement."""
    mode: Literal["max", "min"] = "max"
    """Which values are better."""

    def is_due(self, step: int, *, has_validation: bool) -> bool:
        """Whether a line, with or without a validation, is one that holds the metric.

        Example:
            >>> rule = EarlyStopping(metric="sft/val_nll", mode="min")
            >>> rule.is_due(3, has_validation=False), rule.is_due(4, has_validation=True)
            (False, True)
        """
        is_validation = self.metric.startswith("val/") or "/val_" in self.metric
        return has_validation if is_validation else step > 0

    def improves(self, value: float, *, on: float) -> bool:
        """Whether a value is better than the best one before by more than `minimum_change`."""
        gain = value - on if self.mode == "max" else on - value
        return gain > self.minimum_change


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stagnation:
    """What the recorded steps say about a metric.

    Example:
        >>> rule = EarlyStopping(metric="val/accuracy", patience=2)
        >>> seen = Stagnation()
        >>> for step, value in enumerate((0.5, 0.5, 0.4), 1):
        ...     seen = seen.after(rule, step, {"val/accuracy": value})
        >>> seen.reason(rule)
        'val/accuracy has not risen above 0.5 (step 1) in 2 measurements'
    """

    best: float | None = None
    """Best value; None: the metric was not measured."""
    best_step: int = 0
    """Its step."""
    waited: int = 0
    """Measurements since then."""

    @classmethod
    def read(cls, rule: EarlyStopping, lines: Iterable[StepMetrics]) -> "Stagnation":
        """What the lines of a run say."""
        seen = cls()
        for line in lines:
            seen = seen.after(rule, line.step, line.values)
        return seen

    def after(self, rule: EarlyStopping, step: int, metrics: Mapping[str, float]) -> "Stagnation":
        """The same with one more step; a step that did not measure the metric changes nothing.

        A value that is no number is no improvement.
        """
        value = metrics.get(rule.metric)
        if value is None:
            return self
        is_first = self.best is None and not math.isnan(value)
        if is_first or (self.best is not None and rule.improves(value, on=self.best)):
            return Stagnation(best=value, best_step=step)
        return Stagnation(best=self.best, best_step=self.best_step, waited=self.waited + 1)

    def reason(self, rule: EarlyStopping) -> str | None:
        """Why the run stops; None: it goes on."""
        if self.waited < rule.patience:
            return None
        if self.best is None:
            return f"{rule.metric} has not been a number in {self.waited} measurements"
        verb = "risen above" if rule.mode == "max" else "fallen below"
        by = f" by more than {rule.minimum_change:g}" if rule.minimum_change else ""
        best = f"{self.best:g} (step {self.best_step})"
        return f"{rule.metric} has not {verb} {best}{by} in {self.waited} measurements"
