"""The knobs of a preference loss that a configuration sets, by their own names."""

from typing import Any

from luyen.config.schema.preference import Preference

KNOBS = (
    "beta",
    "label_smoothing",
    "f_divergence_type",
    "f_alpha_divergence_coef",
    "discopop_tau",
    "cpo_alpha",
    "simpo_gamma",
    "alpha",
    "desirable_weight",
    "undesirable_weight",
)


def preference_knobs(preference: Preference) -> dict[str, Any]:
    """Those that are not null; a loss has its own value of the others.

    Example:
        >>> preference_knobs(Preference(beta=0.5))
        {'beta': 0.5}
    """
    given = dict(preference)
    return {name: given[name] for name in KNOBS if given[name] is not None}
