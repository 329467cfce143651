"""Numbers that a person follows while a run goes on, and how they are written."""

import math
import time
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from typing import final

HEADING: ContextVar[str] = ContextVar("heading", default="")
"""What the run is a part of, such as a stage of a pipeline, for displays that open from now on."""


ACCURACY = "validation accuracy"
"""What the share of samples that reach reward 1 is called, where every reward is 0 or 1."""
VALIDATION_REWARD = "validation reward"
"""What the mean reward of a validation is called."""
MEAN = "val/reward/mean@"
"""Beginning of the name of a validation's mean reward; the number of samples follows."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number on the display.

    Example:
        >>> Figure(label="KL to ref", names=("actor/ref_kl", "actor/kl_loss"), form=".4f").show(
        ...     {"actor/kl_loss": 0.00123})
        '0.0012'
    """

    label: str
    """What it is called."""
    names: tuple[str, ...]
    """Metrics it may come from; the first that the step has is shown."""
    form: str
    """How it is formatted."""

    def value(self, metrics: Mapping[str, float]) -> float | None:
        """The number itself; None when the step has none."""
        known = {**metrics, **validated(metrics)}
        return next((known[name] for name in self.names if name in known), None)

    def show(self, metrics: Mapping[str, float]) -> str | None:
        """The number as text; None when the step has none."""
        value = self.value(metrics)
        return None if value is None else format(value, self.form)


def mean_reward(metrics: Mapping[str, float]) -> float | None:
    """The mean reward of a validation; None where there was none."""
    return next((v for name, v in metrics.items() if name.startswith(MEAN)), None)


def validated(metrics: Mapping[str, float]) -> dict[str, float]:
    """What a validation measured, under the name that its scores deserve.

    Where every sample scored 0 or 1, the share that reached 1 is the mean: that is an accuracy.
    Any other reward is called what it is, its mean.

    Example:
        >>> validated({"val/accuracy": 0.25, "val/reward/mean@1": 0.25})
        {'validation accuracy': 0.25}
        >>> validated({"val/accuracy": 0.25, "val/reward/mean@1": 0.4})
        {'validation reward': 0.4}
    """
    share = metrics.get("val/accuracy")
    if share is None:
        return {}
    mean = mean_reward(metrics)
    if mean is None:
        return {ACCURACY: share}
    is_accuracy = math.isclose(mean, share, rel_tol=1e-9, abs_tol=1e-12)
    return {ACCURACY: share} if is_accuracy else {VALIDATION_REWARD: mean}


FIGURES = (
    Figure(label="reward", names=("reward/mean",), form=".3f"),
    Figure(label="accuracy", names=(ACCURACY,), form=".3f"),
    Figure(label="val reward", names=(VALIDATION_REWARD,), form=".3f"),
    Figure(label="nll", names=("sft/nll",), form=".3f"),
    Figure(label="loss", names=("preference/loss", "reward_model/loss"), form=".4f"),
    Figure(label="pairs right", names=("preference/accuracy", "reward_model/accuracy"), form=".3f"),
    Figure(label="from teacher", names=("distill/divergence", "distill/reverse_kl"), form=".4f"),
    Figure(label="entropy", names=("actor/entropy",), form=".3f"),
    Figure(label="length", names=("response_length/mean",), form=".1f"),
    Figure(label="calls a tool", names=("tools/call_fraction",), form=".0%"),
    Figure(label="KL to ref", names=("actor/ref_kl", "actor/kl_loss"), form=".4f"),
    Figure(label="update KL", names=("actor/ppo_kl",), form=".4f"),
    Figure(label="parity gap", names=("parity/max_gap",), form=".2g"),
    Figure(label="tokens/s", names=("time/tokens_per_s",), form=",.0f"),
)
"""What both forms of the display show; the first one is also drawn over time."""


@final
class Clock:
    """How far a run is and when it will be over."""

    def __init__(self) -> None:
        self.total = self.done = self._first = 0
        self._begun = time.monotonic()

    def start(self, total: int, done: int) -> None:
        """Begin to count; steps of an earlier session say nothing about the speed of this one."""
        self.total, self.done, self._first = total, done, done
        self._begun = time.monotonic()

    def elapsed_s(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._begun

    def left_s(self) -> float | None:
        """Seconds to the end at the mean speed so far; None before the first step."""
        made = self.done - self._first
        return self.elapsed_s() / made * (self.total - self.done) if made > 0 else None


def duration(seconds: float | None) -> str:
    """Seconds for people.

    Example:
        >>> duration(5), duration(75), duration(7260), duration(None)
        ('5s', '1m15s', '2h01m', '?')
    """
    if seconds is None:
        return "?"
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    return (
        f"{whole // 60}m{whole % 60:02d}s"
        if whole < 3600
        else f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    )


def sparkline(values: list[float], width: int) -> str:
    """The last values as bars, lowest to highest.

    Example:
        >>> sparkline([0.0, 0.5, 1.0], 8)
        '▁▅█'
    """
    shown = [v for v in values if v == v and abs(v) != float("inf")][-width:]
    low, high = min(shown, default=0.0), max(shown, default=0.0)
    scale = 7 / (high - low) if high > low else 0.0
    return "".join("▁▂▃▄▅▆▇█"[round((v - low) * scale)] for v in shown)
