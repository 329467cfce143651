"""Coefficients that follow a measurement: frozen records; `update` returns the next record.

`state()` is what a checkpoint keeps, `restore(state)` the record that continues from it.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

from luyen.algorithms.checks import require_not_negative, require_positive
from luyen.base.errors import UserError

State = dict[str, float | None]


def _require_finite(name: str, value: float) -> None:
    if not math.isfinite(value):
        fix = "look for NaN log-probabilities: a controller that swallowed it would never recover"
        raise UserError(name, value, "a controller cannot follow it", fix)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class FixedKLController:
    """A constant KL coefficient.

    Example:
        >>> FixedKLController(kl_coef=0.001).update(kl=5.0, n_steps=64).kl_coef
        0.001
    """

    kl_coef: float = 0.001
    """β, the weight of the KL penalty."""

    def __post_init__(self) -> None:
        require_not_negative("kl_coef", self.kl_coef)

    def update(self, *, kl: float, n_steps: int) -> "FixedKLController":
        """Itself, whatever was measured."""
        del kl, n_steps
        return self

    def state(self) -> State:
        """What a checkpoint keeps."""
        return {"kl_coef": self.kl_coef}

    def restore(self, state: Mapping[str, float | None]) -> "FixedKLController":
        """Itself: the coefficient in force is the configured one, not a saved one."""
        del state
        return self


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveKLController:
    """A KL coefficient that steers the KL to a target (Ziegler et al. 2019, arXiv:1909.08593).

    Example:
        The KL is far above its target: the error is clipped to 0.2.

        >>> controller = AdaptiveKLController(kl_coef=0.5, target_kl=0.1, horizon=100)
        >>> controller.update(kl=9.0, n_steps=50).kl_coef
        0.55
    """

    kl_coef: float = 0.001
    """β, the weight of the KL penalty, now."""
    target_kl: float = 0.1
    """The KL to hold."""
    horizon: int = 10000
    """Samples over which a full error would multiply β by 1.2."""

    def __post_init__(self) -> None:
        require_not_negative("kl_coef", self.kl_coef)
        require_positive("target_kl", self.target_kl)
        require_positive("horizon", self.horizon)

    def update(self, *, kl: float, n_steps: int) -> "AdaptiveKLController":
        """β·(1 + clip(KL/target - 1, ±0.2)·n_steps/horizon), never below 0."""
        _require_finite("kl", kl)
        error = min(max(kl / self.target_kl - 1.0, -0.2), 0.2)
        factor = max(1.0 + error * n_steps / self.horizon, 0.0)
        return replace(self, kl_coef=self.kl_coef * factor)

    def state(self) -> State:
        """What a checkpoint keeps."""
        return {"kl_coef": self.kl_coef}

    def restore(self, state: Mapping[str, float | None]) -> "AdaptiveKLController":
        """The configured target and horizon, with the saved coefficient."""
        saved = state["kl_coef"]
        assert saved is not None
        return replace(self, kl_coef=saved)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveEntropyController:
    """An entropy coefficient that works only while entropy is low (Skywork-OR1, arXiv:2505.22312).

    Example:
        >>> control = AdaptiveEntropyController(coefficient=0.0, target=0.2).update(entropy=0.1)
        >>> control.applied, control.update(entropy=0.5).applied
        (0.005, 0.0)
    """

    coefficient: float = 0.0
    """The coefficient that grows and shrinks."""
    target: float = 0.2
    """Entropy in nats per token, at or below which the bonus is applied."""
    delta: float = 0.005
    """Change of the coefficient per optimizer step."""
    min: float = 0.0
    """Smallest coefficient."""
    max: float = 1.0
    """Largest coefficient."""
    last_entropy: float | None = None
    """Entropy of the last optimizer step; None before the first."""

    def __post_init__(self) -> None:
        require_not_negative("adaptive_entropy.delta", self.delta)
        if not self.min <= self.max:
            why = f"it is above adaptive_entropy.max = {self.max}"
            raise UserError("adaptive_entropy.min", self.min, why, "set min <= max")

    @property
    def applied(self) -> float:
        """The coefficient of the next step: 0 while the last entropy is above the target."""
        if self.last_entropy is not None and self.last_entropy > self.target:
            return 0.0
        return self.coefficient

    def update(self, *, entropy: float) -> "AdaptiveEntropyController":
        """One step up if entropy <= target, else one step down; kept within [min, max]."""
        _require_finite("entropy", entropy)
        if entropy <= self.target:
            moved = min(self.coefficient + self.delta, self.max)
        else:
            moved = max(self.coefficient - self.delta, self.min)
        return replace(self, coefficient=moved, last_entropy=entropy)

    def state(self) -> State:
        """What a checkpoint keeps."""
        return {"coefficient": self.coefficient, "last_entropy": self.last_entropy}

    def restore(self, state: Mapping[str, float | None]) -> "AdaptiveEntropyController":
        """The configured target, step and bounds, with the saved coefficient and entropy."""
        saved = state["coefficient"]
        assert saved is not None
        return replace(self, coefficient=saved, last_entropy=state["last_entropy"])
