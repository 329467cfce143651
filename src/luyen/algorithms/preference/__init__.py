"""Preference losses: functions of one sum of log-probabilities per sequence.

Importing this package registers every built-in loss.
"""

from luyen.algorithms.preference import pairwise, pointwise, reference_free
from luyen.algorithms.preference.inputs import (
    PairInputs,
    PreferenceLoss,
    UnpairedInputs,
    preference_losses,
)
from luyen.algorithms.preference.step import (
    PreferenceObjective,
    StepCoefficients,
    step_coefficients,
)

__all__ = [
    "PairInputs",
    "PreferenceLoss",
    "PreferenceObjective",
    "StepCoefficients",
    "UnpairedInputs",
    "pairwise",
    "pointwise",
    "preference_losses",
    "reference_free",
    "step_coefficients",
]
