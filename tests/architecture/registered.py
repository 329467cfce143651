"""The registered algorithms and their knobs, read from the signatures."""

import inspect
from collections.abc import Callable

from luyen.algorithms.advantages.inputs import adv_estimators
from luyen.algorithms.policy_losses.inputs import loss_statistics, policy_losses
from luyen.base.registry import Registry
from tests.architecture.tree import modules

Knobs = dict[str, object]
"""Name -> default."""


def knobs_of(function: Callable[..., object]) -> Knobs:
    """Keyword-only parameters and their defaults."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def loss_knobs_of(name: str) -> Knobs:
    """Knobs of a policy loss and of its statistics pass; the seed is no knob."""
    passed = knobs_of(loss_statistics.get(name)) if name in loss_statistics else {}
    return {k: v for k, v in passed.items() if k != "seed"} | knobs_of(policy_losses.get(name))


def ours(registry: Registry[Callable[..., object]]) -> list[str]:
    """Names that the package registers itself; other tests may have added plugins."""
    assert list(modules()), "importing every module fills the registries"
    return [name for name in registry if registry.get(name).__module__.startswith("luyen.")]


def estimators() -> dict[str, Knobs]:
    """Every advantage estimator of the package."""
    return {name: knobs_of(adv_estimators.get(name)) for name in ours(adv_estimators)}


def losses() -> dict[str, Knobs]:
    """Every policy loss of the package."""
    return {name: loss_knobs_of(name) for name in ours(policy_losses)}
