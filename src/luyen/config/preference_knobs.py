"""The knobs of a preference loss that a configuration sets, by their own names."""

from typing import Any

from luyen.config.schema.preference import Preference


def preference_knobs(preference: Preference) -> dict[str, Any]:
    """Those that are not null; a loss has its own value of the others.

    Example:
        >>> preference_knobs(Preference(beta=0.5))
        {'beta': 0.5}
    """
    given = {
        "beta": preference.beta,
        "label_smoothing": preference.label_smoothing,
        "f_divergence_type": preference.f_divergence_type,
        "f_alpha_divergence_coef": preference.f_alpha_divergence_coef,
        "discopop_tau": preference.discopop_tau,
        "cpo_alpha": preference.cpo_alpha,
        "simpo_gamma": preference.simpo_gamma,
        "alpha": preference.alpha,
        "desirable_weight": preference.desirable_weight,
        "undesirable_weight": preference.undesirable_weight,
    }
    return {name: value for name, value in given.items() if value is not None}
