"""GDPO: every part of the reward is normalised within the group before the parts are added."""

import math
from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from luyen.algorithms.advantages.evidence import SOURCES, given_rewards
from luyen.algorithms.advantages.group import whitened_over_batch
from luyen.algorithms.advantages.grouping import Grouping, centred, group_std
from luyen.algorithms.advantages.inputs import Credit, CreditInputs, adv_estimators
from luyen.algorithms.checks import require_finite, require_float, require_same_shape
from luyen.algorithms.knobs import require_positive
from luyen.base.errors import UserError
from luyen.base.suggest import did_you_mean


@adv_estimators.register("gdpo")
def gdpo(
    inputs: CreditInputs,
    *,
    gdpo_reward_keys: Sequence[str] | None = None,
    gdpo_reward_weights: Sequence[float] | None = None,
    std_epsilon: float = 1e-6,
) -> Credit:
    """Σ_k w_k (r_k - mean) / (std + ε), then whitened over the batch's tokens (arXiv:2601.05242).

    Keys default to all components in their order, weights to ones. The advantage comes from the
    components alone; the token rewards are only checked.
    """
    require_positive("std_epsilon", std_epsilon)
    given_rewards(inputs)
    parts = chosen_components(inputs, gdpo_reward_keys)
    weights = component_weights(gdpo_reward_weights, tuple(parts))
    grouping = Grouping.of(inputs.layout.groups)
    total = torch.zeros_like(next(iter(parts.values())))
    for part, weight in zip(parts.values(), weights, strict=True):
        total = total + weight * centred(part, grouping) / (group_std(part, grouping) + std_epsilon)
    return whitened_over_batch(total, inputs.layout, grouping)


def chosen_components(
    inputs: CreditInputs, keys: Sequence[str] | None
) -> Mapping[str, Float[Tensor, " seq"]]:
    """The components that `keys` name, in that order, each finite for every sequence."""
    given = inputs.components
    if not given:
        why = "algorithm.adv_estimator `gdpo` adds the parts of the reward and none was given"
        raise UserError("components", given, why, SOURCES["components"])
    names = list(given) if keys is None else list(keys)
    if not names or len(set(names)) < len(names):
        why = "it must name at least one component, and none twice"
        raise UserError("gdpo_reward_keys", names, why, "known: " + ", ".join(given))
    for name in names:
        if name not in given:
            why = f"the reward has no component {name!r}"
            raise UserError("gdpo_reward_keys", names, why, did_you_mean(name, given))
        field = f"components[{name!r}]"
        require_float(field, given[name])
        require_same_shape(field, given[name], "groups", inputs.layout.groups)
        require_finite(field, given[name])
    return {name: given[name].detach() for name in names}


def component_weights(weights: Sequence[float] | None, names: tuple[str, ...]) -> Sequence[float]:
    """One finite weight per component; ones by default."""
    if weights is None:
        return [1.0] * len(names)
    if len(weights) != len(names) or not all(math.isfinite(w) for w in weights):
        why = f"{len(names)} components ({', '.join(names)}) need as many finite weights"
        raise UserError("gdpo_reward_weights", list(weights), why, "pass one weight per component")
    return weights
